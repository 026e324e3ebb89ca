//! Listing a directory: names as they are, links as links.

use std::{ffi::OsString, os::unix::ffi::OsStrExt as _, path::Path, sync::Arc};

use rustix::{
    fd::OwnedFd,
    fs::{Dir, CWD},
    io::Errno,
};
use sandmill_wire::ApiError;
use serde::Serialize;

use super::{
    entry::{open_directory, Entry, Kind},
    failure::failed,
};
use crate::proc::AccountNames;

/// Entries in one answer, unless the call says less.
pub const ENTRY_LIMIT: usize = 100_000;
/// Directories that are held open at once on the way down; deeper ones are not entered.
const DEPTH_LIMIT: u32 = 64;

#[derive(Debug, Serialize)]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// There are more entries than the limit, or directories deeper than can be held open.
    pub truncated: bool,
}

/// Lists `path`, which may be a link to a directory, `depth` levels deep (1: its own entries), sorted by name, each
/// directory before its entries. Links below are not followed. What vanishes meanwhile is left out.
///
/// Errors: those of [`failed`].
pub fn list(path: &Path, depth: u32, limit: usize, names: Arc<AccountNames>) -> Result<Listing, ApiError> {
    let directory = open_directory(CWD, path, true).map_err(|errno| failed("list", path, errno))?;
    let mut walk = Walk { limit, names, listing: Listing { entries: Vec::new(), truncated: false } };
    walk.enter(directory, path, depth.clamp(1, DEPTH_LIMIT), depth > DEPTH_LIMIT)
        .map_err(|errno| failed("list", path, errno))?;
    Ok(walk.listing)
}

/// The names in a directory, without `.` and `..`, sorted.
pub fn sorted_names(directory: &OwnedFd) -> Result<Vec<OsString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(std::ffi::OsStr::from_bytes(name).to_owned());
        }
    }
    names.sort();
    Ok(names)
}

struct Walk {
    limit: usize,
    names: Arc<AccountNames>,
    listing: Listing,
}

impl Walk {
    fn enter(&mut self, directory: OwnedFd, path: &Path, depth: u32, capped: bool) -> Result<(), Errno> {
        for name in sorted_names(&directory)? {
            if self.listing.entries.len() >= self.limit {
                self.listing.truncated = true;
                return Ok(());
            }
            let entry = match Entry::at(
                rustix::fd::AsFd::as_fd(&directory),
                &name,
                path.join(&name),
                Arc::clone(&self.names),
            ) {
                Ok(entry) => entry,
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(errno),
            };
            let (kind, below) = (entry.kind, entry.path.clone());
            self.listing.entries.push(entry);
            if kind != Kind::Directory {
                continue;
            }
            if depth == 1 {
                self.listing.truncated |= capped;
                continue;
            }
            match open_directory(&directory, &name, false) {
                Ok(opened) => self.enter(opened, &below, depth - 1, capped)?,
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::fs::symlink};

    use super::{super::scratch::Scratch, *};

    fn names(listing: &Listing) -> Vec<&OsStr> {
        listing.entries.iter().map(Entry::name).collect()
    }

    #[test]
    fn names_are_verbatim() {
        let scratch = Scratch::new();
        let long = "x".repeat(255);
        let odd: Vec<&OsStr> = vec![
            OsStr::new(" l"),
            "-rf".as_ref(),
            "n ".as_ref(),
            "x\ny".as_ref(),
            long.as_ref(),
            OsStr::from_bytes(b"\xff"),
        ];
        for name in &odd {
            std::fs::write(scratch.path("").join(name), "").unwrap();
        }
        let listing = list(&scratch.path(""), 1, ENTRY_LIMIT, Arc::default()).unwrap();
        assert_eq!(names(&listing), odd);
        assert!(serde_json::to_string(&listing).unwrap().contains(r#""name":"\\xff","name_base64":"/w==""#));
        let packed = rmp_serde::to_vec_named(&listing.entries[5]).unwrap();
        assert!(packed.windows(3).any(|window| window == b"\xc4\x01\xff"));
    }

    #[test]
    fn links_are_listed_as_links_and_a_link_lists_its_target() {
        let scratch = Scratch::new();
        std::fs::create_dir_all(scratch.path("d/sub")).unwrap();
        symlink("nowhere", scratch.path("d/dangling")).unwrap();
        symlink("d", scratch.path("link")).unwrap();
        symlink(".", scratch.path("d/sub/loop")).unwrap();
        let listing = list(&scratch.path("link"), 9, ENTRY_LIMIT, Arc::default()).unwrap();
        assert_eq!(names(&listing), ["dangling", "sub", "loop"]);
        assert_eq!(listing.entries[0].target.as_deref(), Some(OsStr::new("nowhere")));
        assert_eq!(listing.entries[2].path, scratch.path("link/sub/loop"));
        assert_eq!(list(&scratch.path("none"), 1, 9, Arc::default()).unwrap_err().code, "not_found");
        assert_eq!(list(&scratch.path("d/dangling"), 1, 9, Arc::default()).unwrap_err().code, "not_found");
    }

    #[test]
    fn a_cut_listing_says_so() {
        let scratch = Scratch::new();
        for name in ["a", "b", "c"] {
            std::fs::write(scratch.path(name), "").unwrap();
        }
        let listing = list(&scratch.path(""), 1, 2, Arc::default()).unwrap();
        assert_eq!((listing.entries.len(), listing.truncated), (2, true));
        assert!(!list(&scratch.path(""), 1, 3, Arc::default()).unwrap().truncated);
    }
}
