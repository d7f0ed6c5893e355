"""Cost: what the canary takes, of time, bandwidth and memory."""

from __future__ import annotations

from dashboards.board import Board, Panel, Query, Section, group, rank, recorded, service

RATE = "[$__rate_interval]"

BOARD = Board(
    uid="kv-canary-cost",
    title="KV canary / Cost",
    says="What the canary takes from the engine, and what the service takes.",
    sections=(
        Section(
            title="Time",
            panels=(
                Panel(
                    title="Overhead",
                    says="Host time of the canary on the engine thread over step time.",
                    queries=(Query(expression=recorded("overhead:ratio5m")),),
                    unit="percentunit",
                ),
                Panel(
                    title="Host time per step by hook",
                    says="head, tail, sweep, patrol, pump; adapter: reading the engine's state.",
                    queries=(
                        Query(
                            expression=f"rate({rank('overhead_seconds_total')}{RATE})"
                            f" / ignoring (phase) group_left () (rate({rank('steps_total')}{RATE}) > 0)",
                            legend="{{phase}} rank {{rank}}",
                        ),
                    ),
                    unit="s",
                ),
            ),
        ),
        Section(
            title="Bandwidth",
            panels=(
                Panel(
                    title="KV bytes read by phase",
                    says="Bytes re-read for comparison, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (instance, rank, phase) (rate({group('bytes_verified_total')}{RATE}))",
                            legend="{{phase}} rank {{rank}}",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="Patrol: budget and use",
                    says="What the patrol may read and what it reads.",
                    queries=(
                        Query(
                            expression=rank("patrol_budget_bytes_per_second"), legend="budget, rank {{rank}}"
                        ),
                        Query(
                            expression=f"""sum by (instance, rank) (rate({group("bytes_verified_total", 'phase="patrol"')}{RATE}))""",
                            legend="used, rank {{rank}}",
                        ),
                    ),
                    unit="Bps",
                ),
            ),
        ),
        Section(
            title="Memory and scraping",
            panels=(
                Panel(
                    title="Records over KV bytes",
                    says="32 bytes per slot, as a share of the pool.",
                    queries=(
                        Query(
                            expression=f"{rank('record_bytes')} / sum without (group) ({rank('pool_bytes')})",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Bytes",
                    says="Records and the pool they protect.",
                    queries=(
                        Query(expression=rank("record_bytes"), legend="records, rank {{rank}}"),
                        Query(expression=group("pool_bytes"), legend="pool {{group}}, rank {{rank}}"),
                    ),
                    unit="bytes",
                ),
                Panel(
                    title="Scrape",
                    says="Time the service takes to collect, and what Prometheus waits for.",
                    queries=(
                        Query(expression=service("scrape_duration_seconds"), legend="collect"),
                        Query(expression='scrape_duration_seconds{job="kv-canary"}', legend="scrape"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Series",
                    says="Samples per scrape: bounded by ranks and groups.",
                    queries=(
                        Query(expression='scrape_samples_scraped{job="kv-canary"}', legend="samples"),
                        Query(expression=f"sum({service('ranks')})", legend="ranks"),
                    ),
                ),
            ),
        ),
    ),
)
