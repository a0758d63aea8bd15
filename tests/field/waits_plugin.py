"""The module of import_cycle in waits_locks.py: it cannot be imported."""

import threading

TABLE = {}


def fill():
    import waits_plugin  # HANG-ALSO import_cycle

    waits_plugin.TABLE["x"] = 1


worker = threading.Thread(target=fill, name="filler")
worker.start()
worker.join()  # HANG import_cycle
