-- include: lib_base lib_workers
-- flags: no-writes allow-oom
-- workers() -> {name, heartbeat frame...} of all workers that are alive, sorted by name. Reads: workers, worker:*.
return alive_workers()
