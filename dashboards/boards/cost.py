"""Cost: time, bandwidth and memory that the canary takes."""

from __future__ import annotations

from dashboards.board import Board, Panel, Query, Section, bands, group, over_ranks, rank, recorded, service

RATE = "[$__rate_interval]"

BOARD = Board(
    uid="kv-canary-cost",
    title="KV canary / Cost",
    description="What the canary costs the engine, and what the service costs.",
    sections=(
        Section(
            title="Time",
            panels=(
                Panel(
                    title="Overhead",
                    description="Host time of the canary on the engine thread over step time.",
                    queries=bands(recorded("overhead:ratio5m")),
                    unit="percentunit",
                ),
                Panel(
                    title="Host time per step by hook",
                    description="head, tail, sweep, patrol; pump: copying counters; adapter: reading the engine's state.",
                    queries=(
                        Query(
                            expression=f"sum by (phase) (rate({rank('overhead_seconds_total')}{RATE}))"
                            f" / ignoring (phase) group_left () sum(rate({rank('steps_total')}{RATE}) > 0)",
                            legend="{{phase}}",
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
                    description="Bytes re-read for comparison, per second.",
                    queries=(
                        Query(
                            expression=f"sum by (phase) ({over_ranks('bytes_verified:rate1m')})",
                            legend="{{phase}}",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="Patrol: budget and use",
                    description="Bytes per second that the patrol may read, and that it reads.",
                    queries=(
                        Query(expression=f"sum({rank('patrol_budget_bytes_per_second')})", legend="budget"),
                        Query(
                            expression=f"""sum({over_ranks("bytes_verified:rate1m", 'phase="patrol"')})""",
                            legend="used",
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
                    description="32 bytes per slot, as a share of the pool.",
                    queries=bands(f"{rank('record_bytes')} / sum without (group) ({rank('pool_bytes')})"),
                    unit="percentunit",
                ),
                Panel(
                    title="Bytes",
                    description="Records and the pool they protect.",
                    queries=(
                        Query(expression=f"sum({rank('record_bytes')})", legend="records"),
                        Query(expression=f"sum by (group) ({group('pool_bytes')})", legend="pool {{group}}"),
                        Query(expression=f"sum({rank('allocated_bytes')})", legend="allocated"),
                    ),
                    unit="bytes",
                ),
                Panel(
                    title="Scrape",
                    description="Duration of the collection in the service, and of the scrape in Prometheus.",
                    queries=(
                        Query(
                            expression=f"max({service('scrape_duration_seconds')})", legend="collect, slowest"
                        ),
                        Query(
                            expression='max(scrape_duration_seconds{job="kv-canary"})',
                            legend="scrape, slowest",
                        ),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Series",
                    description="Samples per scrape; the number of ranks and groups bounds them.",
                    queries=(
                        Query(expression='sum(scrape_samples_scraped{job="kv-canary"})', legend="samples"),
                        Query(expression=f"sum({service('ranks')})", legend="ranks"),
                    ),
                ),
            ),
        ),
    ),
)
