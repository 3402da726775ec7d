-- include: lib_base
-- flags: no-writes allow-oom
-- server() -> id of the server's process
return server_id()
