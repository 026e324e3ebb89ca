//! Which images go when the disk is full: of those that can be had again, the ones that were used longest ago.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Error, Result};

/// Where an image came from, which says whether it may go by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// From a file that may be gone: only a person removes it.
    #[default]
    Imported,
    /// From a registry that still has it.
    Pulled,
    /// A commit without a name, or of a prepared environment, which is prepared again when it is asked for.
    Derived,
}

/// How full the file system of the store may become, in percent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Marks {
    /// Above this, images go.
    pub high_percent: f64,
    /// Until no more than this is used.
    pub low_percent: f64,
}

impl Default for Marks {
    /// kubelet's.
    fn default() -> Self {
        Self { high_percent: 85.0, low_percent: 80.0 }
    }
}

/// What a collection is asked for; empty: what the marks say.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Everything that is unused and can be had again, however full the disk is.
    pub all: bool,
    /// Only what was not used for as long.
    pub unused_for_s: f64,
    /// Imported images, too.
    pub imported: bool,
    /// Until no more of the file system than this is used.
    pub target_percent: Option<f64>,
    /// Say what would go, and remove nothing.
    pub dry_run: bool,
}

impl Request {
    pub fn check(&self) -> Result<()> {
        let wrong = |reason: &str| Err(Error::InvalidArgument { reason: reason.to_owned() });
        if !self.unused_for_s.is_finite() || self.unused_for_s < 0.0 {
            return wrong("unused_for_s is a number of seconds, 0 or more");
        }
        match self.target_percent {
            Some(percent) if !(0.0..=100.0).contains(&percent) => wrong("target_percent is between 0 and 100"),
            _ => Ok(()),
        }
    }

    /// Down to which share of the file system, given what the marks are; None: nothing is to be done.
    pub fn target(&self, marks: Marks, used_percent: f64) -> Option<f64> {
        match (self.all, self.target_percent) {
            (true, _) => Some(0.0),
            (false, Some(target)) => Some(target),
            (false, None) => (used_percent > marks.high_percent).then_some(marks.low_percent),
        }
    }
}

/// What a collection did.
#[derive(Debug, Default, Serialize)]
pub struct Collected {
    pub removed: Vec<Removed>,
    /// Of the file system, now.
    pub used_percent: f64,
    pub free_bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct Removed {
    pub id: String,
    pub names: Vec<String>,
    pub size_bytes: u64,
    pub last_used_at: f64,
}

/// Share of a file system that is used, as `df` counts it, and what is left of it in bytes.
pub fn usage(path: &Path) -> Result<(f64, u64)> {
    let stat = rustix::fs::statvfs(path).map_err(Error::os("look at the file system of", path))?;
    let used = stat.f_blocks.saturating_sub(stat.f_bfree);
    let of = used + stat.f_bavail;
    let percent = if of == 0 { 0.0 } else { 100.0 * used as f64 / of as f64 };
    Ok((percent, stat.f_bavail * stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_decide_unless_the_request_does() {
        let marks = Marks::default();
        let usual = Request::default();
        assert_eq!(usual.target(marks, 85.0), None);
        assert_eq!(usual.target(marks, 85.1), Some(80.0));
        assert_eq!(Request { all: true, ..Request::default() }.target(marks, 1.0), Some(0.0));
        assert_eq!(Request { target_percent: Some(50.0), ..Request::default() }.target(marks, 1.0), Some(50.0));
        assert!(Request { target_percent: Some(101.0), ..Request::default() }.check().is_err());
        assert!(Request { unused_for_s: f64::NAN, ..Request::default() }.check().is_err());
    }

    #[test]
    fn usage_is_a_share() {
        let (percent, _) = usage(Path::new("/")).unwrap();
        assert!((0.0..=100.0).contains(&percent));
    }
}
