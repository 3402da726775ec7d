-- include: lib_base lib_workers
-- flags: no-writes allow-oom
-- workers() -> {name, frame...} of those that are alive, by name. Reads: workers, worker:*.
return alive_workers()
