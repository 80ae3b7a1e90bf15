"""SGLang without a GPU: for tests, the demo, small trainings and comparisons on any machine.

``platform``: an SGLang platform in plain torch. ``portable``: a DeepSeek-V4 in plain torch, and its
SGLang classes. A server on a GPU uses none of it, unless a checkpoint names the portable target.
"""
