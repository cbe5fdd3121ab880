"""The settings file that `echo2-coordinator init` writes: every key, its default, and what it means."""

TEMPLATE = """\
# Settings of an ECHO-2 coordinator. Paths are taken from this file's folder.
# Lines that start with '# ' and a key show the default; take the '# ' away to change it.

# state_dir = "state"                     # key, ledger, lock and status
# database = ""                           # "postgresql+psycopg://echo2@db.example.org/echo2"; else SQLite in state_dir
# database_password_file = ""             # its first line is the password; else libpq looks (PGPASSFILE, ~/.pgpass)
# listen = ["/ip4/0.0.0.0/tcp/4001"]      # where nodes and the learner connect
# announce = []                           # addresses nodes are told instead, e.g. ["/dns/pool.example.org/tcp/4001"]
# heartbeat_seconds = 10.0                # a node is dead after three missed ones
# score_seconds_max = 2.0                 # one reward's time; then it is 0

[rest]
# host = "127.0.0.1"                      # elsewhere every request needs a token, and TLS: one of the two ways below
# port = 8080
# public_page = false                     # true: everybody may see /public/RUN, without a token
# certificate = ""                        # PEM files that make it HTTPS: the certificate with its chain,
# key = ""                                # and its key
# behind_proxy = false                    # or a proxy speaks TLS in front of it,
# proxy_address = ""                      # and only this address may connect

[admission]                               # who may take part, and what a new node has to show
# mode = "token"                          # or "open": anyone; "hand": the operator admits each new node
# applied_max = 200                       # nodes that wait for the operator at a time
# warmup_leases = 10                      # leases of a new node's probation; 0 = no probation
# warmup_returned = 0.8                   # share of them that must come back valid in time
# benchmark_tokens_per_second_min = 0.0   # of a new node's first leases; 0 = any
# expired_share_max = 0.05                # of a node's last 200 leases; more unanswered ones suspend it; 1 = never
# suspension_seconds = 3600.0             # of a suspension that the coordinator decides by itself
# nodes_per_address = 32                  # live nodes of one IPv4 address, or IPv6 /64
# nodes_per_network = 128                 # live nodes of one /24, or IPv6 /48
# new_keys_per_hour = 32                  # keys never seen before of one address; of one network 4 times that

[activation]                              # which of the nodes that are paid work; volunteers always do
# prices = {}                             # dollars an hour by peer id, e.g. { "12D3KooW..." = 0.35 }: the most that a
#                                         # node gets which names a price, and what one gets that names none
# period_seconds = 60.0                   # a loss is answered after one period, a surplus after three
# gamma = 1.1                             # mu_target = gamma mu_min: room for mu_pool to vary
# mu_start = 0.0                          # rollouts a second to aim at before a step was timed; 0 = one node begins
# price_ceiling_hour = 0.0                # dollars; no node that asks more works; 0 = any
# spend_ceiling_hour = 0.0                # dollars; all working nodes together; 0 = any
# order = "price"                         # or "shuffle": prices are not looked at, for comparison
# shuffle_seed = 0

[credit]
# consumed_micros = 1000000               # millionths of a credit for each rollout that is trained on; 0 = none
# stale_micros = 500000                   # for each that came in time and was not used, by no fault of its node
# relayed_gib_micros = 1000000            # for each GiB of snapshots passed on as planned and acknowledged

[run]
name = "run-1"
task = "arithmetic"                       # which prompts and which reward
# task_options = {}                       # what the task itself may be told; for "poker": { opponents = ["rock"] }
model_dir = "../model"                    # made by: echo2-learner prepare --model tiny --out model
learner = "PEER_ID"                       # printed by: echo2-learner identity --home DIR
steps = 100                               # training steps of the whole run
# weight = 1.0                            # where several runs share the pool (further tables [[runs]] with the same
#                                         # keys): share of the nodes, over the sum of the weights of all open runs
# budget = 0.0                            # dollars that nodes may be paid; then nothing more is leased; 0 = no bound
# seed = 0                                # orders the prompts

# S = 3                                   # staleness budget in steps; 0 = synchronous
# kappa = 2                               # steps between snapshots; S - 1 unless set
# R = 256                                 # rollouts per training step, a multiple of n
# n = 8                                   # rollouts per prompt

# tokens_max = 512                        # longest response; of several turns: all turns and answers together
# turn_tokens_max = 64                    # longest turn of a task of several turns, such as poker
# temperature = 1.0
# top_k = 0                               # 0 = off
# top_p = 1.0                             # 1.0 = off
# min_p = 0.0                             # 0.0 = off

# slice_samples_max = 2                   # most samples in one lease
# lease_seconds = 60.0                    # then the slice is given to another node
# broadcast = "auto"                      # or "star", "chain"

# eval_every = 0                          # versions between held-out evaluations while it trains; 0 = none
# eval_samples = 1                        # answers per held-out prompt, k of avg@k
# eval_share = 0.1                        # most that these take of the pool from training
"""
