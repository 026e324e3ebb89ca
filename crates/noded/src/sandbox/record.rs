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
    /// Why it ends, once it does.
    pub cause: Option<Cause>,
}

impl Record {
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
