//! `/health`, `/metrics`, `/init` and `/envs`.

use std::{cell::Cell, collections::BTreeMap, time::Instant};

use bytes::Bytes;
use http::{header, HeaderName, HeaderValue};
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use crate::{
    app::App,
    server::{collect, no_content, Reply, ReplyBody, Request},
};

/// The version of E2B's daemon whose behaviour this one has.
pub const ENVD_VERSION: &str = "0.6.13";
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-envd-version");
const INIT_LIMIT_BYTES: usize = 4 << 20;

pub fn health() -> Reply {
    uncached(no_content())
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Init {
    env_vars: Option<BTreeMap<String, String>>,
    default_user: Option<String>,
    default_workdir: Option<String>,
}

/// Sets the defaults of E2B's calls. What else E2B's own control plane sends (the access token, the time, mounts) is
/// noded's business here, and is not looked at.
pub async fn init(app: &App, request: Request) -> Result<Reply, ApiError> {
    let body = collect(request.into_body(), INIT_LIMIT_BYTES).await?;
    let init: Init = if body.is_empty() {
        Init::default()
    } else {
        serde_json::from_slice(&body)
            .map_err(|error| ApiError::new(400, "invalid_request", format!("invalid request body: {error}")))?
    };
    let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
    app.e2b.change_defaults(|defaults| {
        if let Some(env) = init.env_vars {
            defaults.env = env;
        }
        if let Some(user) = filled(init.default_user) {
            defaults.user = Some(user);
        }
        if let Some(workdir) = filled(init.default_workdir) {
            defaults.workdir = Some(workdir);
        }
    });
    let mut reply = uncached(no_content());
    reply.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static(ENVD_VERSION));
    Ok(reply)
}

/// The environment that the sandbox and `/init` give to every process.
pub fn envs(app: &App) -> Reply {
    let mut env = app.config.env.clone();
    env.extend(app.e2b.defaults().env);
    json(&env)
}

#[derive(Debug, Serialize)]
struct Metrics {
    /// Unix time in seconds.
    ts: u64,
    cpu_count: u64,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// What the last call saw, from which the share of CPU since then follows.
#[derive(Debug, Default)]
pub struct Meter(Cell<Option<(Instant, f64)>>);

impl Meter {
    /// CPU used since the last call, in percent of one core.
    fn cpu_pct(&self, cpu_s: f64) -> f64 {
        let now = Instant::now();
        let share = match self.0.replace(Some((now, cpu_s))) {
            Some((then, before)) if now > then => (cpu_s - before) / now.duration_since(then).as_secs_f64(),
            _ => 0.0,
        };
        (share.max(0.0) * 10_000.0).round() / 100.0
    }
}

/// Usage, as E2B's clients read it. Memory is what the sandbox may use and uses where a limit is known, else the machine's.
pub fn metrics(app: &App) -> Reply {
    let usage = crate::usage::snapshot(app);
    let cores = app.config.cpus.map_or_else(machine_cores, |cpus| cpus.ceil().max(1.0) as u64);
    let memory = memory();
    let total = app.config.memory_limit_bytes.unwrap_or(memory.total);
    let used = memory.used.min(total);
    let disk = rustix::fs::statvfs("/").ok();
    let blocks = |count: fn(&rustix::fs::StatVfs) -> u64| disk.as_ref().map_or(0, |disk| count(disk) * disk.f_frsize);
    let (disk_total, disk_free) = (blocks(|disk| disk.f_blocks), blocks(|disk| disk.f_bavail));
    json(&Metrics {
        ts: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        cpu_count: cores,
        cpu_used_pct: app.e2b.meter.cpu_pct(usage.cpu_s) / cores as f64,
        mem_total: total,
        mem_used: used,
        mem_cache: memory.cache,
        mem_total_mib: total >> 20,
        mem_used_mib: used >> 20,
        disk_used: disk_total.saturating_sub(disk_free),
        disk_total,
    })
}

fn machine_cores() -> u64 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u64)
}

#[derive(Debug, Default)]
struct Memory {
    total: u64,
    used: u64,
    cache: u64,
}

/// From /proc/meminfo, whose lines are `Name:  number kB`.
fn memory() -> Memory {
    parse_memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_memory(text: &str) -> Memory {
    let value = |wanted: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(wanted)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
    };
    let total = value("MemTotal");
    let cache = value("Cached") + value("SReclaimable");
    Memory { total, cache, used: total.saturating_sub(value("MemFree") + value("Buffers") + cache) }
}

/// E2B's shape of an error outside Connect, with ours beside it.
pub fn failure(error: &ApiError) -> Reply {
    #[derive(Serialize)]
    struct Body<'a> {
        code: u16,
        message: &'a str,
        error_code: &'a str,
        hint: Option<&'a str>,
        retryable: bool,
    }
    // E2B says 401 for a user that isn't there, and clients tell it from a wrong path by that.
    let status = if error.code == "user_not_found" { 401 } else { error.status };
    let mut reply = json(&Body {
        code: status,
        message: &error.message,
        error_code: &error.code,
        hint: error.hint.as_deref(),
        retryable: error.retryable,
    });
    *reply.status_mut() = http::StatusCode::from_u16(status).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    reply
}

/// The answer to a procedure that no service has.
pub fn unknown_procedure(path: &str) -> Reply {
    let failure = Failure::new(super::failure::Code::Unimplemented, format!("there is no procedure {path}"));
    super::connect::unary_failure(&failure.with_status(http::StatusCode::NOT_FOUND))
}

fn json(value: &impl Serialize) -> Reply {
    let mut reply = Reply::new(ReplyBody::full(Bytes::from(serde_json::to_vec(value).unwrap_or_default())));
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    uncached(reply)
}

fn uncached(mut reply: Reply) -> Reply {
    reply.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_without_caches() {
        let memory =
            parse_memory("MemTotal: 1000 kB\nMemFree: 300 kB\nBuffers: 50 kB\nCached: 100 kB\nSReclaimable: 10 kB\n");
        assert_eq!((memory.total, memory.cache, memory.used), (1000 << 10, 110 << 10, 540 << 10));
    }

    #[test]
    fn cpu_is_a_share_of_the_time_between_two_looks() {
        let meter = Meter::default();
        assert_eq!(meter.cpu_pct(5.0), 0.0);
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert!(meter.cpu_pct(6.0) > 100.0);
    }
}
