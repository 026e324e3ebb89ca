//! What happens in a directory, or in a whole tree, told by inotify in E2B's terms.
//!
//! A write of ours is a temporary file and a rename; a watcher is told of it as of an ordinary write.

use std::{
    collections::{HashMap, VecDeque},
    ffi::{OsStr, OsString},
    fs::File,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use tokio::io::{unix::AsyncFd, Interest};

use super::{
    failure::{Code, Failure},
    filesystem::look_up,
    filesystem_messages::{EventType, FilesystemEvent, WatchRequest},
};
use crate::{
    files::{
        entry::{open_directory, Kind},
        failure::{failed, shown},
        listing::sorted_names,
        path::escaped,
        pool,
        upload::Temporary,
    },
    proc::AccountNames,
    sys,
};

/// Directories that one watcher watches.
const DIRECTORY_LIMIT: usize = 8192;
/// Levels that a recursive watcher goes down.
const DEPTH_LIMIT: usize = 64;
/// Events that wait to be fetched.
const EVENT_LIMIT: usize = 16 << 10;

/// A watcher and the events that nobody has fetched yet.
pub struct Watch {
    source: Arc<Source>,
    root: PathBuf,
    recursive: bool,
    include_entry: bool,
    names: Arc<AccountNames>,
    /// Watched directories by inotify's number, relative to the root.
    directories: HashMap<i32, PathBuf>,
    /// The rename that is under way from one of our temporary names.
    landing: Option<(u32, Temporary)>,
    events: VecDeque<FilesystemEvent>,
    failure: Option<Failure>,
}

/// The inotify descriptor; what is behind `readable` can be waited for without the watch.
pub struct Source(AsyncFd<File>);

impl Source {
    /// Waits until something happened.
    pub async fn readable(&self) {
        if let Ok(mut guard) = self.0.readable().await {
            // The one who drains finds out when there is no more.
            guard.retain_ready();
        }
    }

    fn add(&self, path: &Path) -> Result<i32, Errno> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(self.0.get_ref(), path, flags)
    }
}

/// One event as inotify tells it.
struct Raw {
    directory: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Option<OsString>,
}

impl Watch {
    /// Begins to watch `root`.
    ///
    /// Errors: `not_found`; `invalid_argument` for what is no directory, or is on a network's file system (unless the
    /// request allows it); `resource_exhausted` when the kernel, or we, watch no more directories.
    pub async fn begin(root: PathBuf, request: &WatchRequest, names: Arc<AccountNames>) -> Result<Self, Failure> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|errno| Failure::new(Code::ResourceExhausted, format!("no more watchers: {errno}")))?;
        let source = sys::watch(fd, Interest::READABLE)
            .map_err(|error| Failure::new(Code::Internal, format!("watching: {error}")))?;
        let mut watch = Self {
            source: Arc::new(Source(source)),
            root,
            recursive: request.recursive,
            include_entry: request.include_entry,
            names,
            directories: HashMap::new(),
            landing: None,
            events: VecDeque::new(),
            failure: None,
        };
        let (root, network) = (watch.root.clone(), request.allow_network_mounts);
        pool::short(move || check(&root, network)).await??;
        watch.add_tree(PathBuf::new(), false).await?;
        Ok(watch)
    }

    pub fn source(&self) -> Arc<Source> {
        Arc::clone(&self.source)
    }

    /// The events until now. Errors: `data_loss` when some were lost; from then on always.
    pub async fn take(&mut self) -> Result<Vec<FilesystemEvent>, Failure> {
        self.drain().await;
        match (&self.failure, self.events.is_empty()) {
            (Some(failure), true) => Err(failure.clone()),
            _ => Ok(self.events.drain(..).collect()),
        }
    }

    /// Reads all that inotify has to tell.
    pub async fn drain(&mut self) {
        while self.failure.is_none() {
            let batch = self.read();
            if batch.is_empty() {
                return;
            }
            for raw in batch {
                if let Err(failure) = self.digest(raw).await {
                    self.failure = Some(failure);
                    return;
                }
            }
        }
    }

    fn read(&mut self) -> Vec<Raw> {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 16 << 10];
        let read = self.source.0.try_io(Interest::READABLE, |fd| {
            let mut reader = inotify::Reader::new(fd, &mut buffer);
            let mut batch = Vec::new();
            // A first read that would block says that there is nothing; later events come out of the buffer.
            loop {
                let event = match reader.next() {
                    Ok(event) => event,
                    Err(Errno::INTR) => continue,
                    Err(errno) if batch.is_empty() => return Err(errno.into()),
                    Err(_) => break,
                };
                batch.push(Raw {
                    directory: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
                });
                if reader.is_buffer_empty() {
                    break;
                }
            }
            Ok(batch)
        });
        read.unwrap_or_default()
    }

    async fn digest(&mut self, raw: Raw) -> Result<(), Failure> {
        if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) || self.events.len() >= EVENT_LIMIT {
            let message =
                "events came faster than they were fetched, and some are lost: look at the directory, and watch anew";
            return Err(Failure::new(Code::DataLoss, message));
        }
        if raw.flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&raw.directory);
            return Ok(());
        }
        let Some(directory) = self.directories.get(&raw.directory).cloned() else { return Ok(()) };
        let Some(name) = raw.name else {
            // A directory below the root is told of by the one above it.
            if directory.as_os_str().is_empty() {
                if let Some(kind) = kind_of(raw.flags) {
                    self.tell(kind, PathBuf::from(".")).await?;
                }
            }
            return Ok(());
        };
        let path = directory.join(&name);
        if let Some(temporary) = Temporary::of(&name) {
            if raw.flags.contains(ReadFlags::MOVED_FROM) {
                self.landing = Some((raw.cookie, temporary));
            }
            return Ok(());
        }
        if raw.flags.contains(ReadFlags::MOVED_TO) {
            if let Some((_, temporary)) = self.landing.take_if(|(cookie, _)| *cookie == raw.cookie) {
                return self.tell_write(path, temporary).await;
            }
        }
        let Some(kind) = kind_of(raw.flags) else { return Ok(()) };
        let is_directory = raw.flags.contains(ReadFlags::ISDIR);
        self.tell(kind, path.clone()).await?;
        match kind {
            EventType::Create if is_directory && self.recursive => self.add_tree(path, true).await,
            EventType::Rename if is_directory && self.recursive => {
                self.forget_tree(&path);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn tell_write(&mut self, path: PathBuf, temporary: Temporary) -> Result<(), Failure> {
        if temporary == Temporary::New {
            self.tell(EventType::Create, path.clone()).await?;
            self.tell(EventType::Chmod, path.clone()).await?;
        }
        self.tell(EventType::Write, path).await
    }

    async fn tell(&mut self, kind: EventType, path: PathBuf) -> Result<(), Failure> {
        let lives = matches!(kind, EventType::Create | EventType::Write | EventType::Chmod);
        let entry = if self.include_entry && lives {
            let (full, names) = (self.root.join(&path), Arc::clone(&self.names));
            // One that is gone again has no entry.
            pool::short(move || look_up(&full, names)).await?.ok()
        } else {
            None
        };
        self.events.push_back(FilesystemEvent { name: escaped(path.as_os_str()), kind: kind as i32, entry });
        Ok(())
    }

    /// Watches a directory, and with `recursive` all below. One that is new may have entries already: `tell` of those.
    async fn add_tree(&mut self, top: PathBuf, tell: bool) -> Result<(), Failure> {
        let (source, root, recursive) = (Arc::clone(&self.source), self.root.clone(), self.recursive);
        let room = DIRECTORY_LIMIT.saturating_sub(self.directories.len());
        let mut found = Found { room, ..Found::default() };
        let found = pool::short(move || {
            let added = add_below(&source, &root, &top, recursive, DEPTH_LIMIT, &mut found);
            added.map(|()| found).map_err(|errno| refused(&root.join(&top), errno))
        })
        .await??;
        self.directories.extend(found.directories);
        if tell {
            for (path, written) in found.entries {
                self.tell(EventType::Create, path.clone()).await?;
                if written {
                    self.tell(EventType::Write, path).await?;
                }
            }
        }
        Ok(())
    }

    fn forget_tree(&mut self, top: &Path) {
        let source = &self.source;
        self.directories.retain(|number, path| {
            let below = path.starts_with(top);
            if below {
                let _ = inotify::remove_watch(source.0.get_ref(), *number);
            }
            !below
        });
    }
}

fn kind_of(flags: ReadFlags) -> Option<EventType> {
    if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
        Some(EventType::Create)
    } else if flags.contains(ReadFlags::MODIFY) {
        Some(EventType::Write)
    } else if flags.intersects(ReadFlags::DELETE | ReadFlags::DELETE_SELF) {
        Some(EventType::Remove)
    } else if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF) {
        Some(EventType::Rename)
    } else if flags.contains(ReadFlags::ATTRIB) {
        Some(EventType::Chmod)
    } else {
        None
    }
}

fn check(root: &Path, allow_network: bool) -> Result<(), Failure> {
    const NETWORK: [i64; 5] = [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546];
    let stat = rustix::fs::stat(root).map_err(|errno| failed("watch", root, errno))?;
    if Kind::of(&stat) != Kind::Directory {
        return Err(Failure::invalid(format!("path {} is not a directory", shown(root))));
    }
    let statfs = rustix::fs::statfs(root).map_err(|errno| failed("watch", root, errno))?;
    if !allow_network && NETWORK.contains(&statfs.f_type) {
        let message = format!("cannot watch path on network filesystem: {}", shown(root));
        return Err(Failure::invalid(message));
    }
    Ok(())
}

fn refused(path: &Path, errno: Errno) -> Failure {
    if errno == Errno::NOSPC {
        let message =
            format!("{} has more directories than can be watched (8192, or fs.inotify.max_user_watches)", shown(path));
        return Failure::new(Code::ResourceExhausted, message);
    }
    failed("watch", path, errno).into()
}

#[derive(Default)]
struct Found {
    directories: Vec<(i32, PathBuf)>,
    /// What is below, and whether it is a file with something in it.
    entries: Vec<(PathBuf, bool)>,
    room: usize,
}

fn add_below(
    source: &Source,
    root: &Path,
    top: &Path,
    recursive: bool,
    depth: usize,
    found: &mut Found,
) -> Result<(), Errno> {
    if found.directories.len() >= found.room || depth == 0 {
        return Err(Errno::NOSPC);
    }
    let full = root.join(top);
    let gone = |errno| matches!(errno, Errno::NOENT | Errno::NOTDIR) && !top.as_os_str().is_empty();
    match source.add(&full) {
        Ok(number) => found.directories.push((number, top.to_owned())),
        Err(errno) if gone(errno) => return Ok(()),
        Err(errno) => return Err(errno),
    }
    if !recursive {
        return Ok(());
    }
    // The watch came first: what appears from here on is told of by it.
    let names = match open_directory(rustix::fs::CWD, &full, true).and_then(|directory| sorted_names(&directory)) {
        Ok(names) => names,
        Err(errno) if gone(errno) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    for name in names.iter().filter(|name| Temporary::of(name).is_none()) {
        let path = top.join(name);
        let Ok(stat) = rustix::fs::lstat(root.join(&path)) else { continue };
        let kind = Kind::of(&stat);
        if found.entries.len() < EVENT_LIMIT {
            found.entries.push((path.clone(), kind == Kind::File && stat.st_size > 0));
        }
        if kind == Kind::Directory {
            add_below(source, root, &path, recursive, depth - 1, found)?;
        }
    }
    Ok(())
}
