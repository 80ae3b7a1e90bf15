// What the launching code of SGLang's c_plan.cuh gives its kernels on a GPU whose lengths are
// there, as a verify's are. MTP_PAD is its own expression.

static Prefill0Params p0;
static Prefill1Params p1;

extern "C" int32_t pad_of(int32_t compress_ratio, int32_t ring_size) {
  const bool is_overlap = (compress_ratio == 4);
  const int32_t window_size = compress_ratio * (is_overlap ? 2 : 1);
  return MTP_PAD;
}

extern "C" void plan_prefill(
    PlanC* c, PlanW* w, const RID_T* rid, const R2T_T* r2t, const F2S_T* f2s, const IDX_T* seq,
    const IDX_T* extend, int64_t stride, uint32_t batch, int32_t page, int32_t ring, int32_t ratio,
    bool req_ring, uint32_t rows, int32_t pad) {
  p0 = {c, w, seq, extend, batch, rows, ratio, page, pad, req_ring};
  threads::run(kMaxPrefillBatchSize, [] { plan_compress_prefill_kernel0(p0); });
  p1 = {c, w, rid, r2t, f2s, stride, rows, rows, rows, rows, rows, page, ring, ratio, req_ring};
  blockDim.x = 1;
  threadIdx.x = 0;
  for (blockIdx.x = 0; blockIdx.x < rows; ++blockIdx.x) plan_compress_prefill_kernel_1(p1);
}

extern "C" void plan_decode(
    PlanD* d, const RID_T* rid, const R2T_T* r2t, const F2S_T* f2s, const IDX_T* seq,
    int64_t stride, uint32_t batch, int32_t page, int32_t ring, int32_t ratio, bool req_ring) {
  const DecodeParams p = {d, rid, r2t, f2s, seq, stride, batch, page, ring, ratio, req_ring};
  blockDim.x = 1;
  threadIdx.x = 0;
  for (blockIdx.x = 0; blockIdx.x < batch; ++blockIdx.x) plan_compress_decode_kernel(p);
}
