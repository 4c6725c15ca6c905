# What every process of a cluster's host starts with: `. ~/odmoe/code/env.sh`, before anything of ours.
export PATH="$HOME/odmoe/venv/bin:$PATH"
export PYTHONPATH="$HOME/odmoe/code"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$HOME/odmoe/keys/ray_token"
export RAY_USAGE_STATS_ENABLED=0
export ODMOE_TLS="$HOME/odmoe/keys"
# A process that sets its title must not overwrite the environment that it is known by.
export SPT_NOENV=1
# Ray's launcher sets the one, which would leave torch a single thread; the other would win over the file above.
unset OMP_NUM_THREADS RAY_AUTH_TOKEN
export ODMOE_NODE_PORT=8701
# Ray would kill nodes, the main node too, when other programs have taken 95 % of a host's memory. The kernel kills when
# none is left: the shadow first, workers then.
export RAY_memory_monitor_refresh_ms="${RAY_memory_monitor_refresh_ms:-0}"
# gRPC writes a line for each failed handshake; our own log counts them.
export GRPC_VERBOSITY=NONE
# Ray's autoscaler runs as a script beside a scheduler.py of its own, which would be imported in place of our package.
export PYTHONSAFEPATH=1
odmoe() { python -m odmoe "$@"; }
# Ends this cluster's processes on this host. Ray's own `ray stop` ends every Ray of the user, and root's of all users.
stop_cluster() { python3 "$HOME/odmoe/code/odmoe/machines/probe.py" stop; }
ray() { if [ "$1" = stop ]; then stop_cluster; else command ray "$@"; fi; }
