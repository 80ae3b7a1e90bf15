"""Servers of tests that start warm: forked from a Python that has done the imports already.

Starting a server costs some forty CPU seconds, nearly all of them for importing torch, transformers
and SGLang three times: in the HTTP process, in the scheduler and in the detokenizer. Here a
*template* imports them once. It loads no plugin, reads no server argument and starts no thread.
``client.start`` takes the place of ``subprocess.Popen``: it forks a child from the template, which
becomes what the command line asked for. A child that may spawn processes keeps a clean copy of the
template next to it, so that what SGLang spawns is forked from the state before any hook, too.

A child gets the asked environment, folder, file descriptors and session, and its parent is whoever
asked: it is waited for, signalled and killed as any other child. Whatever could differ from an
ordinary start is started in the ordinary way: another interpreter or option, or a variable that
was read while importing (``environment.py`` watches which).
"""
