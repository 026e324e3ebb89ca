//! `filesystem.Filesystem`: E2B's file calls, but for contents (see [`super::contents`]).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    failure::{Code, Failure},
    filesystem_messages::{
        EntryInfo, EntryResponse, FileType, ListDirRequest, ListDirResponse, MoveRequest, PathRequest,
    },
    process_messages::Empty,
    state::Caller,
    wire::Timestamp,
};
use crate::{
    app::App,
    files::{
        attributes::Of,
        entry::{Entry, Kind},
        failure::shown,
        listing, operations, path, pool,
    },
    proc::AccountNames,
};

/// Attributes that hold E2B's metadata of a file.
pub const METADATA_PREFIX: &str = "user.e2b.";

pub async fn stat(app: &App, caller: &Caller, request: PathRequest) -> Result<EntryResponse, Failure> {
    let (path, names) = (caller.path(request.path)?, app.procs.accounts().names());
    answer(pool::short(move || look_up(&path, names)).await??)
}

pub async fn make_dir(app: &App, caller: &Caller, request: PathRequest) -> Result<EntryResponse, Failure> {
    let (path, owner) = (caller.path(request.path)?, caller.owner());
    let names = app.procs.accounts().names();
    let work = move || {
        if let Ok(found) = Entry::of(&path, true, Arc::clone(&names)) {
            return Err(match found.kind {
                Kind::Directory => {
                    Failure::new(Code::AlreadyExists, format!("directory already exists: {}", shown(&path)))
                }
                _ => Failure::invalid(format!("path already exists but it is not a directory: {}", shown(&path))),
            });
        }
        if !operations::mkdir(&path, owner, 0o755, true, true)? {
            return Err(Failure::new(Code::AlreadyExists, format!("directory already exists: {}", shown(&path))));
        }
        look_up(&path, names)
    };
    answer(pool::short(work).await??)
}

pub async fn rename(app: &App, caller: &Caller, request: MoveRequest) -> Result<EntryResponse, Failure> {
    let (from, to) = (caller.path(request.source)?, caller.path(request.destination)?);
    let (owner, names) = (caller.owner(), app.procs.accounts().names());
    let work = move || {
        operations::rename(&from, &to, owner, true, true)?;
        look_up(&to, names)
    };
    answer(pool::short(work).await??)
}

pub async fn remove(caller: &Caller, request: PathRequest) -> Result<Empty, Failure> {
    let path = caller.path(request.path)?;
    pool::long(move || operations::remove(&path, true, true)).await??;
    Ok(Empty {})
}

pub async fn list_dir(app: &App, caller: &Caller, request: ListDirRequest) -> Result<ListDirResponse, Failure> {
    let path = caller.path(request.path)?;
    let names = app.procs.accounts().names();
    let work = move || {
        let listing = listing::list(&path, request.depth.max(1), listing::ENTRY_LIMIT, names)?;
        if listing.truncated {
            // The answer has no field that could say so, and a part must not pass for the whole.
            let message = format!("{} has more entries than an answer can hold", shown(&path));
            return Err(Failure::new(Code::ResourceExhausted, message));
        }
        Ok(ListDirResponse { entries: listing.entries.iter().map(entry_info).collect() })
    };
    pool::long(work).await?
}

fn answer(entry: EntryInfo) -> Result<EntryResponse, Failure> {
    Ok(EntryResponse { entry: Some(entry) })
}

pub fn look_up(path: &Path, names: Arc<AccountNames>) -> Result<EntryInfo, Failure> {
    Ok(entry_info(&Entry::of(path, false, names)?))
}

/// An entry as E2B sees it: a link has the type and mode of its target, and names it by its full path.
fn entry_info(entry: &Entry) -> EntryInfo {
    let (mut kind, mut mode) = (entry.kind, entry.mode & 0o777);
    let mut target: Option<PathBuf> = None;
    if kind == Kind::Symlink {
        target = Some(std::fs::canonicalize(&entry.path).unwrap_or_else(|_| entry.path.clone()));
        let reached = rustix::fs::stat(&entry.path);
        // A link that leads nowhere is no unknown thing: clients leave those out of a list.
        kind = reached.map_or(Kind::Symlink, |stat| Kind::of(&stat));
        mode = reached.map_or(0, |stat| stat.st_mode & 0o777);
    }
    let metadata = match kind {
        Kind::File | Kind::Directory => Of::Path(&entry.path).texts(METADATA_PREFIX),
        _ => Default::default(),
    };
    EntryInfo {
        name: path::escaped(entry.name()),
        kind: match kind {
            Kind::File => FileType::File,
            Kind::Directory => FileType::Directory,
            Kind::Symlink => FileType::Symlink,
            _ => FileType::Unspecified,
        } as i32,
        path: path::escaped(entry.path.as_os_str()),
        size: i64::try_from(entry.size).unwrap_or(i64::MAX),
        mode,
        permissions: permissions(entry.kind, entry.mode),
        owner: entry.owner(),
        group: entry.group(),
        modified_time: Some(Timestamp { seconds: entry.mtime.0, nanos: entry.mtime.1 as i32 }),
        symlink_target: target.map(|target| path::escaped(target.as_os_str())),
        metadata,
    }
}

/// The mode as Go writes it, which is what E2B's clients get: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`.
fn permissions(kind: Kind, mode: u32) -> String {
    let mut text = String::new();
    text.push_str(match kind {
        Kind::Directory => "d",
        Kind::Symlink => "L",
        Kind::BlockDevice => "D",
        Kind::CharDevice => "Dc",
        Kind::Fifo => "p",
        Kind::Socket => "S",
        Kind::File | Kind::Unknown => "",
    });
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) == 0 { '-' } else { letter });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_written_as_go_does() {
        assert_eq!(permissions(Kind::File, 0o644), "-rw-r--r--");
        assert_eq!(permissions(Kind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(permissions(Kind::Directory, 0o1777), "dtrwxrwxrwx");
        assert_eq!(permissions(Kind::Symlink, 0o777), "Lrwxrwxrwx");
        assert_eq!(permissions(Kind::File, 0o4755), "urwxr-xr-x");
        assert_eq!(permissions(Kind::CharDevice, 0o666), "Dcrw-rw-rw-");
    }
}
