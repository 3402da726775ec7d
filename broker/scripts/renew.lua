-- include: lib_base lib_arguments lib_tokens
-- flags: allow-oom
-- renew(ttl_s, {member, token}...) -> {server id, token of a lease that the caller has lost...}
-- A copy lasts until its sample is done.
-- Touches: leases, retry; reads group:*.
return { server_id(), unpack(renew_leases(1)) }
