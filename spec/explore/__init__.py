"""Tries every interleaving of faults on the real core, and large random ones.

``configuration`` says which worlds are explored and with how many faults. A ``world`` is made of real
rank cores (``ranks``, kept compact by ``codec``), real scheduler cores (``schedulers``), the messages
under way (``post``), the memory and the copies (``memory``) and what vLLM and the router do
(``requests``). ``search`` visits every state of it; ``mutants`` shows that a mistake would be found;
``simulate`` draws large worlds at random.
"""
