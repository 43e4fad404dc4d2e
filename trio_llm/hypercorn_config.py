"""Safe values for `hypercorn -c python:trio_llm.hypercorn_config 'trio_llm:create_app()'`.

Every name here but those of modules is a setting of Hypercorn's.
"""

from trio_llm import spinning

spinning.spin_shortly()  # before a worker imports torch

worker_class = "trio"
workers = 1  # each worker would load an engine of its own
bind = ["127.0.0.1:8000"]
graceful_timeout = 30.0  # Hypercorn's own 3 s would cut running streams
startup_timeout = 600.0  # a model takes longer to load than Hypercorn's 60 s
shutdown_timeout = 60.0
keep_alive_timeout = 75.0  # longer than proxies keep theirs
include_server_header = False
alpn_protocols = ["http/1.1"]  # its HTTP/2 has no back-pressure
