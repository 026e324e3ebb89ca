//! A sandbox's state on disk: `DIR/sandboxes/<id>/state.json`.
//!
//! Written by rename without fsync: it must survive a SIGKILL of noded, for which the page cache is enough. After a crash of
//! the machine no sandbox is left to describe; another boot id says so, and what lies there is removed whatever it says.

use std::{
    fs, io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    info::{Cause, EnforcedLimits},
    spec::SandboxSpec,
};
use crate::isolation::{cgroup::Group, disk::Disk};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Creating,
    Running,
    Ending,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    pub phase: Phase,
    pub boot_id: String,
    pub spec: SandboxSpec,
    pub slot: u32,
    pub created_at: f64,
    pub started_at: f64,
    /// Id of the image, also when the spec gave a name that means another one by now.
    pub image: String,
    /// Of sandboxd; 0 before it is started.
    pub pid: i32,
    pub start_time: u64,
    pub group: Group,
    pub disk: Option<Disk>,
    /// Target and upper directory of each tree.
    pub uppers: Vec<(PathBuf, PathBuf)>,
    pub limits: Option<EnforcedLimits>,
    pub ip: Option<Ipv4Addr>,
    pub dns: Option<Ipv4Addr>,
    /// Why it ends, once it does.
    pub cause: Option<Cause>,
}

impl Record {
    /// A create that begins.
    pub fn new(spec: SandboxSpec, boot_id: String, image: String, slot: u32, created_at: f64) -> Self {
        Self {
            phase: Phase::Creating,
            boot_id,
            spec,
            slot,
            created_at,
            started_at: 0.0,
            image,
            pid: 0,
            start_time: 0,
            group: Group::default(),
            disk: None,
            uppers: Vec::new(),
            limits: None,
            ip: None,
            dns: None,
            cause: None,
        }
    }

    pub fn save(&self, dir: &Path) -> io::Result<()> {
        let draft = dir.join("state.json.new");
        fs::write(&draft, serde_json::to_vec(self)?)?;
        fs::rename(&draft, dir.join("state.json"))
    }

    /// None when there is none, or when it is not a record of ours: a create that was killed before it wrote one.
    pub fn load(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(dir.join("state.json")).ok()?).ok()
    }
}

#[cfg(test)]
impl Record {
    /// Of the least spec.
    pub fn sample() -> Self {
        let spec = r#"{"id": "i0123456789abcdefghi", "image": "host", "token": "t", "lease": {"ttl_s": 5.0}}"#;
        Self::new(serde_json::from_str(spec).expect("a good spec"), String::new(), String::new(), 0, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_record_is_none() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Record::load(dir.path()).is_none());
        let record = Record::sample();
        record.save(dir.path()).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().spec.id, record.spec.id);
        fs::write(dir.path().join("state.json"), "{\"phase\":").unwrap();
        assert!(Record::load(dir.path()).is_none());
    }
}
