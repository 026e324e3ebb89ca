//! A sandbox's state on disk: `DIR/sandboxes/<id>/state.json`, written once it runs, and renamed to `ending-<cause>.json` when
//! it begins to end. A directory without a record is a create that nobody was told of: nothing of it is worth keeping.
//!
//! Nothing is synced: it must survive a SIGKILL of noded, for which the page cache is enough. After a crash of the machine no
//! sandbox is left to describe; another boot id says so, and what lies there is removed whatever it says.

use std::{
    ffi::OsStr,
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

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
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
    /// Why it ends, once it does. The file's name says it.
    #[serde(skip)]
    pub cause: Option<Cause>,
}

impl Record {
    /// A create that begins.
    pub fn new(spec: SandboxSpec, boot_id: String, image: String, slot: u32, created_at: f64) -> Self {
        Self {
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

    /// Writes the record of a sandbox that runs. Killed in between, it is torn, which reads as none: no caller has heard of the
    /// sandbox yet.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        fs::write(dir.join(RUNNING), serde_json::to_vec(self)?)
    }

    /// Makes the record's file, empty, which reads as none.
    pub fn reserve(dir: &Path) -> io::Result<()> {
        fs::File::create(dir.join(RUNNING)).map(drop)
    }

    /// Notes why it ends; the first cause stays.
    pub fn end(&mut self, dir: &Path, cause: Cause) -> io::Result<()> {
        if self.cause.is_some() {
            return Ok(());
        }
        self.cause = Some(cause);
        fs::rename(dir.join(RUNNING), dir.join(ending(cause)))
    }

    /// None when there is none, or when it is not a record of ours: a create that was killed before it wrote one.
    pub fn load(dir: &Path) -> Option<Self> {
        let names = Cause::ALL.into_iter().map(|cause| (ending(cause), Some(cause)));
        let (text, cause) = std::iter::once((RUNNING.to_owned(), None))
            .chain(names)
            .find_map(|(name, cause)| Some((fs::read(dir.join(name)).ok()?, cause)))?;
        let mut record: Self = serde_json::from_slice(&text).ok()?;
        record.cause = cause;
        Some(record)
    }

    /// Whether this file of a sandbox's directory is its record.
    pub fn is_file(name: &OsStr) -> bool {
        name == RUNNING || name.as_encoded_bytes().starts_with(b"ending-")
    }

    /// The sandbox's directory has another name now.
    pub fn moved(&mut self, from: &Path, to: &Path) {
        let paths =
            self.uppers.iter_mut().map(|(_, upper)| upper).chain(self.disk.iter_mut().map(|disk| &mut disk.root));
        for path in paths {
            if let Ok(below) = path.strip_prefix(from) {
                *path = if below.as_os_str().is_empty() { to.to_owned() } else { to.join(below) };
            }
        }
    }
}

const RUNNING: &str = "state.json";

fn ending(cause: Cause) -> String {
    format!("ending-{}.json", cause.name())
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
        record.write(dir.path()).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().spec.id, record.spec.id);
        fs::write(dir.path().join("state.json"), "{\"boot_id\":").unwrap();
        assert!(Record::load(dir.path()).is_none());
    }

    #[test]
    fn the_first_cause_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record::sample();
        record.write(dir.path()).unwrap();
        assert!(Record::load(dir.path()).unwrap().cause.is_none());
        record.end(dir.path(), Cause::LeaseExpired).unwrap();
        record.end(dir.path(), Cause::Killed).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().cause, Some(Cause::LeaseExpired));
        assert!(fs::read_dir(dir.path()).unwrap().all(|entry| Record::is_file(&entry.unwrap().file_name())));
    }

    #[test]
    fn paths_follow_their_directory() {
        let mut record = Record::sample();
        record.uppers = vec![("/".into(), "/s/a/upper-root".into()), ("/usr".into(), "/elsewhere/upper".into())];
        record.disk = Some(Disk { backend: crate::isolation::disk::Backend::Plain, root: "/s/a".into() });
        record.moved(Path::new("/s/a"), Path::new("/s/b"));
        assert_eq!(record.uppers[0].1, Path::new("/s/b/upper-root"));
        assert_eq!(record.uppers[1].1, Path::new("/elsewhere/upper"));
        assert_eq!(record.disk.unwrap().root, Path::new("/s/b"));
    }
}
