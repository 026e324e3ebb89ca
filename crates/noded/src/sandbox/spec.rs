//! What a create asks for.

use std::collections::BTreeMap;

use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxSpec {
    pub id: String,
    pub image: String,
    /// Access token of the data path.
    pub token: String,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub workdir: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default)]
    pub hostname: Option<String>,
    #[serde(default)]
    pub network: NetworkMode,
    #[serde(default)]
    pub limits: Limits,
    pub lease: LeaseSpec,
    /// The changes stay on the state directory's own file system, so that a commit moves them.
    #[serde(default)]
    pub plain_disk: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    #[default]
    None,
    All,
}

/// Limits as asked for; null is none, but for `pids`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Cores.
    pub cpu: Option<f64>,
    pub memory_bytes: Option<u64>,
    /// Null: [`DEFAULT_PIDS`].
    pub pids: Option<u64>,
    pub disk_bytes: Option<u64>,
    pub inodes: Option<u64>,
    /// Null: half of the memory limit; without one 64 MiB.
    pub shm_bytes: Option<u64>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseSpec {
    pub ttl_s: f64,
    #[serde(default)]
    pub renew_on_use: bool,
}

pub const DEFAULT_PIDS: u64 = 4096;
/// Of a sandbox that asks for none. The same for all, so that one can be made before it is known whose it will be.
pub const HOSTNAME: &str = "sandbox";
/// Under it sandboxd itself does not fit.
const LEAST_MEMORY_BYTES: u64 = 8 << 20;
const LEAST_DISK_BYTES: u64 = 1 << 20;
const LONGEST_LEASE_S: f64 = 366.0 * 24.0 * 3600.0;

impl Limits {
    pub fn pids(&self) -> u64 {
        self.pids.unwrap_or(DEFAULT_PIDS)
    }

    pub fn shm(&self) -> u64 {
        self.shm_bytes.unwrap_or_else(|| self.memory_bytes.map_or(64 << 20, |memory| memory / 2))
    }
}

impl SandboxSpec {
    /// Refuses what makes no sense, saying which field.
    pub fn check(&self) -> Result<(), ApiError> {
        let good_id = self.id.len() == 20
            && self.id.starts_with('i')
            && self.id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if !good_id {
            return Err(invalid("id", "`i` and 19 characters of a-z0-9"));
        }
        let hostname = self.hostname();
        let good_name = (1..=63).contains(&hostname.len())
            && hostname.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.');
        if !good_name {
            return Err(invalid("hostname", "1 to 63 characters of a-z A-Z 0-9 - ."));
        }
        if self.env.iter().any(|(name, value)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')) {
            return Err(invalid("env", "names without `=`, no NUL"));
        }
        if self.workdir.as_deref().is_some_and(|path| !path.starts_with('/') || path.contains('\0')) {
            return Err(invalid("workdir", "an absolute path"));
        }
        check_ttl(self.lease.ttl_s)?;
        let limits = &self.limits;
        if limits.cpu.is_some_and(|cpu| !(0.01..=4096.0).contains(&cpu)) {
            return Err(invalid("limits.cpu", "cores from 0.01 on"));
        }
        if limits.memory_bytes.is_some_and(|bytes| bytes < LEAST_MEMORY_BYTES) {
            return Err(invalid("limits.memory_bytes", "at least 8 MiB"));
        }
        if limits.pids.is_some_and(|pids| !(8..=4_194_304).contains(&pids)) {
            return Err(invalid("limits.pids", "from 8 to 4,194,304"));
        }
        if limits.disk_bytes.is_some_and(|bytes| bytes < LEAST_DISK_BYTES) {
            return Err(invalid("limits.disk_bytes", "at least 1 MiB"));
        }
        if limits.inodes.is_some_and(|inodes| inodes < 32) {
            return Err(invalid("limits.inodes", "at least 32"));
        }
        if self.plain_disk && (limits.disk_bytes.is_some() || limits.inodes.is_some()) {
            return Err(invalid("plain_disk", "false where a disk or inode limit is asked for"));
        }
        Ok(())
    }

    pub fn hostname(&self) -> &str {
        self.hostname.as_deref().unwrap_or(HOSTNAME)
    }
}

/// A lease's length.
pub fn check_ttl(ttl_s: f64) -> Result<(), ApiError> {
    if ttl_s > 0.0 && ttl_s <= LONGEST_LEASE_S {
        Ok(())
    } else {
        Err(invalid("ttl_s", "more than 0 and at most a year"))
    }
}

fn invalid(field: &str, needed: &str) -> ApiError {
    ApiError::new(400, "invalid_argument", format!("{field} is not as it must be: {needed}"))
        .details(serde_json::json!({"field": field}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(change: impl FnOnce(&mut serde_json::Value)) -> Result<(), ApiError> {
        let mut value = serde_json::json!({
            "id": "i0123456789abcdefghi", "image": "host", "token": "t", "lease": {"ttl_s": 5.0}
        });
        change(&mut value);
        serde_json::from_value::<SandboxSpec>(value).unwrap().check()
    }

    #[test]
    fn the_least_is_enough() {
        spec(|_| ()).unwrap();
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let field = |change: fn(&mut serde_json::Value)| spec(change).unwrap_err().details["field"].clone();
        assert_eq!(field(|value| value["id"] = "../x".into()), "id");
        assert_eq!(field(|value| value["hostname"] = "a/b".into()), "hostname");
        assert_eq!(field(|value| value["limits"] = serde_json::json!({"cpu": 0})), "limits.cpu");
        assert_eq!(field(|value| value["limits"] = serde_json::json!({"memory_bytes": 1})), "limits.memory_bytes");
        assert_eq!(field(|value| value["lease"] = serde_json::json!({"ttl_s": 0})), "ttl_s");
        assert_eq!(field(|value| value["env"] = serde_json::json!({"A=B": ""})), "env");
    }

    #[test]
    fn defaults() {
        assert_eq!(Limits::default().pids(), 4096);
        assert_eq!(Limits { memory_bytes: Some(512 << 20), ..Limits::default() }.shm(), 256 << 20);
    }
}
