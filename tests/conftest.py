"""What holds for every test, however the suite was started."""

import signal

from hypothesis import settings

# Hypothesis examples have no deadline: on a machine whose cores are taken, any of them may take a second.
settings.register_profile("t2g", deadline=None)
settings.load_profile("t2g")

# A shell lets what it puts into the background ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
