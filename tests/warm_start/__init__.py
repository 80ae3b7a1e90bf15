"""Servers and commands forked from a Python that has imported SGLang: a start without imports.

Whatever is not plainly the same after a fork is started in the ordinary way (``client.start``).
"""
