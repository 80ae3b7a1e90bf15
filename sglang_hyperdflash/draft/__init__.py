"""A drafter's configuration, tensors, reducer and drafts, and the target's hc_head."""
