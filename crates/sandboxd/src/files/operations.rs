//! The small calls: `fs` of the wire, one JSON or MessagePack object in, one out.
//!
//! | `op` | fields (default) | answer |
//! |---|---|---|
//! | `stat` | `path`, `follow` (false) | entry |
//! | `list` | `path`, `depth` (1), `limit` (100000) | `{"entries": [entry], "truncated": bool}` |
//! | `mkdir` | `path`, `mode` (0755), `parents` (true), `exist_ok` (true) | entry |
//! | `move` | `path`, `to`, `overwrite` (true), `parents` (true) | entry |
//! | `remove` | `path`, `recursive` (true), `missing_ok` (false) | `{"removed": N}` |
//! | `chmod` | `path`, `mode`, `recursive` (false) | entry |
//! | `chown` | `path`, `owner`, `recursive` (false) | entry |
//! | `symlink` | `path`, `target`, `parents` (true) | entry |
//! | `readlink` | `path` | `{"target"}` |
//!
//! Every call takes `user`: who owns what it makes, and whose home `~` is. An `entry` is what [`super::entry::Entry`]
//! writes: `name path type size_bytes mode uid gid owner group modified_at inode links target`. `mode` is a number or an
//! octal string, `owner` is like `user`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, RenameFlags},
    io::Errno,
};
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize, Serializer};

use super::{
    entry::{link_text, Entry, Kind},
    failure::failed,
    listing::{self, Listing},
    path::{write_name, WirePath},
    place::{make_directories, without_slashes, Owner, Parents, Place},
    tree::{self, Change},
};
use crate::proc::AccountNames;

/// A call, as it comes.
#[derive(Debug, Deserialize)]
pub struct Call {
    pub op: String,
    pub path: WirePath,
    pub user: Option<String>,
    to: Option<WirePath>,
    target: Option<WirePath>,
    pub owner: Option<String>,
    mode: Option<WireMode>,
    depth: Option<u32>,
    limit: Option<usize>,
    #[serde(flatten)]
    flags: BTreeMap<String, bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum WireMode {
    Number(u32),
    Octal(String),
}

/// An operation with everything decided.
#[derive(Debug)]
pub enum Operation {
    Stat { follow: bool },
    List { depth: u32, limit: usize },
    Mkdir { mode: u32, parents: bool, exist_ok: bool },
    Move { to: PathBuf, overwrite: bool, parents: bool },
    Remove { recursive: bool, missing_ok: bool },
    Change { change: Change, recursive: bool },
    Symlink { target: std::ffi::OsString, parents: bool },
    Readlink,
}

/// What a call gives back.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    Entry(Box<Entry>),
    Listing(Listing),
    Removed { removed: u64 },
    Target(Target),
}

#[derive(Debug)]
pub struct Target(std::ffi::OsString);

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let readable = serializer.is_human_readable();
        let mut map = serializer.serialize_map(None)?;
        write_name::<S>(&mut map, "target", &self.0, readable)?;
        serde::ser::SerializeMap::end(map)
    }
}

/// Permission bits as a number or as octal digits. Errors: 400 `invalid_argument`.
pub fn parse_mode(text: &str) -> Result<u32, ApiError> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    u32::from_str_radix(digits, 8)
        .map_err(|_| invalid(format!("{text:?} is not a mode in octal digits")))
        .and_then(check_mode)
}

fn check_mode(mode: u32) -> Result<u32, ApiError> {
    if mode > 0o7777 {
        return Err(invalid(format!("{mode:o} is not a mode: at most 7777 (octal)")));
    }
    Ok(mode)
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(400, "invalid_argument", message)
}

impl Call {
    /// Checks the call's fields. `resolve` makes a path absolute; `owner` is whom `chown` names.
    ///
    /// Errors: 400 `invalid_argument`, `path_too_long`, `unknown_operation`.
    pub fn operation(
        &self,
        resolve: impl Fn(&WirePath) -> Result<PathBuf, ApiError>,
        owner: Option<Owner>,
    ) -> Result<Operation, ApiError> {
        let missing = |field: &str| invalid(format!("{} needs {field}", self.op));
        let mode = match &self.mode {
            None => None,
            Some(WireMode::Number(number)) => Some(check_mode(*number)?),
            Some(WireMode::Octal(text)) => Some(parse_mode(text)?),
        };
        let parents = self.flag("parents", true);
        Ok(match self.op.as_str() {
            "stat" => Operation::Stat { follow: self.flag("follow", false) },
            "list" => Operation::List {
                depth: self.depth.unwrap_or(1),
                limit: self.limit.unwrap_or(listing::ENTRY_LIMIT).min(listing::ENTRY_LIMIT),
            },
            "mkdir" => Operation::Mkdir { mode: mode.unwrap_or(0o755), parents, exist_ok: self.flag("exist_ok", true) },
            "move" => Operation::Move {
                to: resolve(self.to.as_ref().ok_or_else(|| missing("to"))?)?,
                overwrite: self.flag("overwrite", true),
                parents,
            },
            "remove" => Operation::Remove {
                recursive: self.flag("recursive", true),
                missing_ok: self.flag("missing_ok", false),
            },
            "chmod" => Operation::Change {
                change: Change::Mode(mode.ok_or_else(|| missing("mode"))?),
                recursive: self.flag("recursive", false),
            },
            "chown" => Operation::Change {
                change: Change::Owner(owner.ok_or_else(|| missing("owner"))?),
                recursive: self.flag("recursive", false),
            },
            "symlink" => Operation::Symlink {
                target: self.target.as_ref().ok_or_else(|| missing("target"))?.verbatim()?,
                parents,
            },
            "readlink" => Operation::Readlink,
            other => {
                return Err(ApiError::new(400, "unknown_operation", format!("fs has no operation {other:?}"))
                    .hint("stat, list, mkdir, move, remove, chmod, chown, symlink, readlink"))
            }
        })
    }

    fn flag(&self, name: &str, default: bool) -> bool {
        self.flags.get(name).copied().unwrap_or(default)
    }
}

impl Operation {
    /// Whether it may walk a whole tree.
    pub fn is_long(&self) -> bool {
        match self {
            Self::List { .. } => true,
            Self::Remove { recursive, .. } | Self::Change { recursive, .. } => *recursive,
            _ => false,
        }
    }

    /// Does it, blocking. Errors: those of [`failed`].
    pub fn run(self, path: &Path, owner: Owner, names: Arc<AccountNames>) -> Result<Answer, ApiError> {
        let entry = |path: &Path| Entry::of(path, false, names.clone()).map(|entry| Answer::Entry(Box::new(entry)));
        match self {
            Self::Stat { follow } => Entry::of(path, follow, names).map(|entry| Answer::Entry(Box::new(entry))),
            Self::List { depth, limit } => listing::list(path, depth, limit, names).map(Answer::Listing),
            Self::Mkdir { mode, parents, exist_ok } => {
                mkdir(path, owner, mode, parents, exist_ok)?;
                entry(path)
            }
            Self::Move { to, overwrite, parents } => {
                rename(path, &to, owner, overwrite, parents)?;
                entry(&to)
            }
            Self::Remove { recursive, missing_ok } => {
                remove(path, recursive, missing_ok).map(|removed| Answer::Removed { removed })
            }
            Self::Change { change, recursive } => {
                let place = match change {
                    // A link has no mode of its own: its target's is meant.
                    Change::Mode(_) => Place::of(&without_slashes(path), Parents::MustExist)?,
                    Change::Owner(_) => Place::of_entry(path, Parents::MustExist)?,
                };
                tree::change(path, &place.directory, &place.name, change, recursive)?;
                entry(path)
            }
            Self::Symlink { target, parents } => {
                let place = Place::of_entry(path, parents_for(parents, owner))?;
                rustix::fs::symlinkat(&target, &place.directory, &place.name)
                    .map_err(|errno| failed("make the link", path, errno))?;
                let (uid, gid) = (super::place::uid(owner), super::place::gid(owner));
                rustix::fs::chownat(&place.directory, &place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                    .map_err(|errno| failed("give its owner to", path, errno))?;
                entry(path)
            }
            Self::Readlink => {
                let place = Place::of_entry(path, Parents::MustExist)?;
                match link_text(rustix::fd::AsFd::as_fd(&place.directory), &place.name) {
                    Ok(target) => Ok(Answer::Target(Target(target))),
                    Err(Errno::INVAL) => {
                        Err(ApiError::new(400, "not_a_link", format!("{} is not a link", super::failure::shown(path))))
                    }
                    Err(errno) => Err(failed("read the link", path, errno)),
                }
            }
        }
    }
}

fn parents_for(make: bool, owner: Owner) -> Parents {
    if make {
        Parents::Make(owner)
    } else {
        Parents::MustExist
    }
}

/// Makes a directory; says whether it is new.
pub fn mkdir(path: &Path, owner: Owner, mode: u32, parents: bool, exist_ok: bool) -> Result<bool, ApiError> {
    let refused = |errno| failed("make the directory", path, errno);
    if !parents {
        Place::of_entry(path, Parents::MustExist)?;
    }
    let made = make_directories(None, path, owner, mode).map_err(refused)?;
    if !made.created && !exist_ok {
        return Err(refused(Errno::EXIST));
    }
    Ok(made.created)
}

/// Renames `from` to `to`.
pub fn rename(from: &Path, to: &Path, owner: Owner, overwrite: bool, parents: bool) -> Result<(), ApiError> {
    let source = Place::of_entry(from, Parents::MustExist)?;
    // Looked at first: a source that is missing must not make the target's parents.
    rustix::fs::statat(&source.directory, &source.name, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|errno| failed("move", from, errno))?;
    let target = Place::of_entry(to, parents_for(parents, owner))?;
    let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    rustix::fs::renameat_with(&source.directory, &source.name, &target.directory, &target.name, flags)
        .map_err(|errno| failed("move", if errno == Errno::NOENT { from } else { to }, errno))
}

/// Removes `path`; says how many entries went.
pub fn remove(path: &Path, recursive: bool, missing_ok: bool) -> Result<u64, ApiError> {
    let place = match Place::of_entry(path, Parents::MustExist) {
        Err(error) if missing_ok && matches!(error.code.as_str(), "not_found" | "not_a_directory") => return Ok(0),
        place => place?,
    };
    let refused = |errno| failed("remove", path, errno);
    let kind = match rustix::fs::statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Kind::of(&stat),
        Err(Errno::NOENT) if missing_ok => return Ok(0),
        Err(errno) => return Err(refused(errno)),
    };
    if recursive || kind != Kind::Directory {
        return tree::remove(path, &place.directory, &place.name);
    }
    rustix::fs::unlinkat(&place.directory, &place.name, AtFlags::REMOVEDIR).map(|()| 1).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::{super::scratch::Scratch, *};

    const ME: Owner = Owner { uid: 1000, gid: 1000 };

    fn call(json: serde_json::Value) -> Result<Answer, ApiError> {
        let call: Call = serde_json::from_value(json).unwrap();
        let base = super::super::path::Base { home: "/".into(), start: "/".into() };
        let path = call.path.resolve(&base)?;
        call.operation(|path| path.resolve(&base), Some(ME))?.run(&path, ME, Arc::default())
    }

    fn code(json: serde_json::Value) -> String {
        call(json).unwrap_err().code
    }

    #[test]
    fn directories_are_made_moved_and_removed() {
        let scratch = Scratch::new();
        let [a, b] = ["a/b/c", "new/place"].map(|name| scratch.path(name).to_str().unwrap().to_owned());
        call(serde_json::json!({"op": "mkdir", "path": a, "mode": "700"})).unwrap();
        assert_eq!(code(serde_json::json!({"op": "mkdir", "path": a, "exist_ok": false})), "already_exists");
        assert_eq!(code(serde_json::json!({"op": "move", "path": "/nope", "to": b})), "not_found");
        assert!(!scratch.path("new").exists());
        call(serde_json::json!({"op": "move", "path": a, "to": b})).unwrap();
        assert!(scratch.path("new/place").is_dir());
        let top = scratch.path("new/").to_str().unwrap().to_owned();
        assert_eq!(code(serde_json::json!({"op": "remove", "path": top, "recursive": false})), "not_empty");
        let answer = call(serde_json::json!({"op": "remove", "path": top})).unwrap();
        assert_eq!(serde_json::to_value(&answer).unwrap(), serde_json::json!({"removed": 2}));
        assert_eq!(code(serde_json::json!({"op": "remove", "path": top})), "not_found");
        call(serde_json::json!({"op": "remove", "path": top, "missing_ok": true})).unwrap();
    }

    #[test]
    fn links_are_made_and_read() {
        let scratch = Scratch::new();
        let path = scratch.path("l").to_str().unwrap().to_owned();
        call(serde_json::json!({"op": "symlink", "path": path, "target": "some where"})).unwrap();
        let answer = call(serde_json::json!({"op": "readlink", "path": path})).unwrap();
        assert_eq!(serde_json::to_value(&answer).unwrap(), serde_json::json!({"target": "some where"}));
        assert_eq!(code(serde_json::json!({"op": "readlink", "path": "/"})), "invalid_argument");
        let answer = serde_json::to_value(call(serde_json::json!({"op": "stat", "path": path})).unwrap()).unwrap();
        assert_eq!((answer["type"].as_str(), answer["uid"].as_u64()), (Some("symlink"), Some(1000)));
        assert_eq!(code(serde_json::json!({"op": "chmod", "path": path, "mode": 0o600})), "not_found");
    }

    #[test]
    fn wrong_calls_are_refused() {
        assert_eq!(code(serde_json::json!({"op": "format", "path": "/"})), "unknown_operation");
        assert_eq!(code(serde_json::json!({"op": "chmod", "path": "/x"})), "invalid_argument");
        assert_eq!(code(serde_json::json!({"op": "chmod", "path": "/x", "mode": "9"})), "invalid_argument");
        assert_eq!(code(serde_json::json!({"op": "remove", "path": "/"})), "invalid_argument");
        assert_eq!(code(serde_json::json!({"op": "stat", "path": "a\0"})), "invalid_argument");
    }
}
