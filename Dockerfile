# HYPERDFLASH on SGLang's own image; docs/containers.md says how to build and run it.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}

COPY . /opt/sglang-hyperdflash
RUN python3 -m pip install --no-cache-dir --break-system-packages /opt/sglang-hyperdflash
