# What every process of a cluster's host starts with: `. ~/odmoe/code/env.sh`, before anything of ours.
export PATH="$HOME/odmoe/venv/bin:$PATH"
export PYTHONPATH="$HOME/odmoe/code"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$HOME/odmoe/keys/ray_token"
export RAY_USAGE_STATS_ENABLED=0
export ODMOE_TLS="$HOME/odmoe/keys"
# Ray's launcher sets the one, which would leave torch a single thread; the other would win over the file above.
unset OMP_NUM_THREADS RAY_AUTH_TOKEN
export ODMOE_NODE_PORT=8701
# Ray's autoscaler runs as a script beside a scheduler.py of its own, which would be imported in place of our package.
export PYTHONSAFEPATH=1
odmoe() { python -m odmoe "$@"; }
export GRPC_VERBOSITY=NONE
