//! A write that is whole or not there: to a temporary name in the same directory, then renamed.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, IoSlice, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::{Path, PathBuf},
};

use bytes::{Buf as _, Bytes};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use sandmill_wire::ApiError;

use super::{
    attributes,
    entry::Kind,
    failure::{failed, failed_io, is_directory, not_regular},
    place::{gid, uid, Owner, Parents, Place},
};

/// Every temporary name begins so.
const TEMPORARY: &[u8] = b".sandmill-";
/// And ends so when it will replace a file, for whoever watches the directory.
const REPLACES: &[u8] = b".old";
/// Mode of a file that is new, unless the call says otherwise.
const NEW_MODE: u32 = 0o644;
/// Most pieces in one write.
const PIECES: usize = 64;

/// What a temporary name says about the rename to come; None for any other name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Temporary {
    New,
    Replaces,
}

impl Temporary {
    pub fn of(name: &OsStr) -> Option<Self> {
        let name = name.as_bytes();
        let replaces = name.ends_with(REPLACES);
        name.starts_with(TEMPORARY).then_some(if replaces { Self::Replaces } else { Self::New })
    }
}

/// What a write leaves at the file's place.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// To whom a new file belongs, and each directory made for it. An existing file keeps its owner.
    pub owner: Owner,
    /// None: an existing file keeps its mode, a new one gets 0644.
    pub mode: Option<u32>,
    /// Make the directories that are missing above it.
    pub parents: bool,
}

/// A file being written. Dropped before [`Upload::commit`], it leaves no trace (directories made for it stay).
pub struct Upload {
    path: PathBuf,
    place: Place,
    temporary: OsString,
    file: File,
    mode: u32,
    done: bool,
}

impl Upload {
    /// Errors: those of [`failed`]; 400 `is_a_directory`; 400 `not_a_regular_file`, at once, for pipes, sockets and devices.
    pub fn begin(path: &Path, wanted: Wanted) -> Result<Self, ApiError> {
        let parents = if wanted.parents { Parents::Make(wanted.owner) } else { Parents::MustExist };
        let place = Place::of(path, parents)?;
        let existing = match rustix::fs::statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(failed("write", path, errno)),
        };
        match existing.as_ref().map(Kind::of) {
            None | Some(Kind::File) => {}
            Some(Kind::Directory) => return Err(is_directory(path)),
            Some(kind) => return Err(not_regular(path, kind.name())),
        }
        let (temporary, file) =
            create(&place.directory, existing.is_some()).map_err(|errno| no_temporary(path, &place, errno))?;
        let owner = existing.as_ref().map_or(wanted.owner, |stat| Owner { uid: stat.st_uid, gid: stat.st_gid });
        let mode = wanted.mode.or(existing.as_ref().map(|stat| stat.st_mode & 0o7777)).unwrap_or(NEW_MODE);
        // From here on, dropping removes the temporary file.
        let upload = Self { path: path.to_owned(), place, temporary, file, mode, done: false };
        rustix::fs::fchown(&upload.file, Some(uid(owner)), Some(gid(owner)))
            .map_err(|errno| failed("give its owner to", path, errno))?;
        if existing.is_some() {
            upload.keep_attributes();
        }
        Ok(upload)
    }

    /// Attributes in the user's namespace stay with a file that is replaced. Best effort: not every file system has them.
    fn keep_attributes(&self) {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        if let Ok(old) = rustix::fs::openat(&self.place.directory, &self.place.name, flags, Mode::empty()) {
            attributes::copy_user(old.as_fd(), self.file.as_fd());
        }
    }

    /// Errors: 507 `no_space`, and those of [`failed`].
    pub fn write(&mut self, chunks: &mut [Bytes]) -> Result<(), ApiError> {
        self.write_all(chunks).map_err(|error| failed_io("write", &self.path, &error))
    }

    fn write_all(&mut self, mut chunks: &mut [Bytes]) -> io::Result<()> {
        while let Some(first) = chunks.first() {
            if first.is_empty() {
                chunks = &mut chunks[1..];
                continue;
            }
            let mut slices = [IoSlice::new(&[]); PIECES];
            for (slice, chunk) in slices.iter_mut().zip(chunks.iter()) {
                *slice = IoSlice::new(chunk);
            }
            let mut written = match self.file.write_vectored(&slices[..chunks.len().min(PIECES)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            for chunk in chunks.iter_mut() {
                let part = written.min(chunk.len());
                chunk.advance(part);
                written -= part;
            }
        }
        Ok(())
    }

    /// The open file, to set attributes on.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Puts the file in its place; returns its stat.
    pub fn commit(mut self) -> Result<Stat, ApiError> {
        self.place_file().map_err(|errno| failed("write", &self.path, errno))
    }

    fn place_file(&mut self) -> Result<Stat, Errno> {
        rustix::fs::fchmod(&self.file, Mode::from_raw_mode(self.mode))?;
        let directory = self.place.directory.as_fd();
        match rustix::fs::renameat(directory, &self.temporary, directory, &self.place.name) {
            Ok(()) => {
                self.done = true;
                rustix::fs::fstat(&self.file)
            }
            // A file that is a mount of its own (/etc/hosts in a pod) has no name that could be replaced.
            Err(Errno::BUSY) => self.write_in_place(),
            Err(errno) => Err(errno),
        }
    }

    fn write_in_place(&mut self) -> Result<Stat, Errno> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let target = rustix::fs::openat(&self.place.directory, &self.place.name, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&target)?.st_mode) != FileType::RegularFile {
            return Err(Errno::BUSY);
        }
        rustix::fs::ftruncate(&target, 0)?;
        rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Start(0))?;
        let mut target = File::from(target);
        io::copy(&mut &self.file, &mut target).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        rustix::fs::fstat(&target)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.done {
            let _ = rustix::fs::unlinkat(&self.place.directory, &self.temporary, AtFlags::empty());
        }
    }
}

/// A fresh temporary name.
pub fn temporary_name(replaces: bool) -> Result<OsString, Errno> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty())?;
    let end = if replaces { ".old" } else { ".new" };
    Ok(OsString::from(format!(".sandmill-{:016x}{end}", u64::from_ne_bytes(random))))
}

/// Makes a temporary file in `directory`.
pub fn create(directory: &OwnedFd, replaces: bool) -> Result<(OsString, File), Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    loop {
        let name = temporary_name(replaces)?;
        match rustix::fs::openat(directory, &name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok((name, file.into())),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Whether a directory belongs to /proc, /sys, a cgroup tree or a terminal's file system.
pub fn is_virtual(directory: &OwnedFd) -> bool {
    const VIRTUAL: [i64; 5] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x0027_e0eb, 0x1cd1];
    rustix::fs::fstatfs(directory).is_ok_and(|statfs| VIRTUAL.contains(&statfs.f_type))
}

/// /proc, /sys and the like have files that can be written but not replaced.
fn no_temporary(path: &Path, place: &Place, errno: Errno) -> ApiError {
    if is_virtual(&place.directory) {
        return ApiError::new(
            400,
            "not_a_regular_file",
            format!("{} belongs to the kernel and can't be replaced by a file", super::failure::shown(path)),
        )
        .hint("write it from a command in the sandbox");
    }
    failed("write", path, errno)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{symlink, MetadataExt as _, PermissionsExt as _};

    use super::{super::scratch::Scratch, *};

    fn wanted() -> Wanted {
        Wanted { owner: Owner { uid: 1234, gid: 1235 }, mode: None, parents: true }
    }

    fn write(path: &Path, data: &'static [u8]) -> Result<Stat, ApiError> {
        let mut upload = Upload::begin(path, wanted())?;
        upload.write(&mut [Bytes::new(), data.into()])?;
        upload.commit()
    }

    #[test]
    fn new_parents_belong_to_the_user_and_older_ones_stay() {
        let scratch = Scratch::new();
        write(&scratch.path("n1/n2/f"), b"x").unwrap();
        for new in ["n1", "n1/n2", "n1/n2/f"] {
            let metadata = scratch.path(new).metadata().unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (1234, 1235), "{new}");
        }
        assert_eq!(scratch.path("").metadata().unwrap().uid(), 0);
        assert_eq!(scratch.path("n1/n2/f").metadata().unwrap().mode() & 0o7777, 0o644);
        assert_eq!(scratch.path("n1").metadata().unwrap().mode() & 0o7777, 0o755);
    }

    #[test]
    fn an_existing_file_keeps_its_mode_and_owner() {
        let scratch = Scratch::new();
        let path = scratch.path("f");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
        write(&path, b"new").unwrap();
        let metadata = path.metadata().unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.uid()), (0o750, 0));
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn links_lead_to_what_is_written() {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("d")).unwrap();
        symlink("d/../d/target", scratch.path("link")).unwrap();
        symlink("link", scratch.path("second")).unwrap();
        symlink("self", scratch.path("self")).unwrap();
        write(&scratch.path("second"), b"x").unwrap();
        assert_eq!(std::fs::read(scratch.path("d/target")).unwrap(), b"x");
        assert!(scratch.path("second").is_symlink());
        assert_eq!(write(&scratch.path("self"), b"x").unwrap_err().code, "too_many_links");
    }

    #[test]
    fn what_holds_no_bytes_is_refused() {
        let scratch = Scratch::new();
        rustix::fs::mkfifoat(rustix::fs::CWD, scratch.path("p"), Mode::RWXU).unwrap();
        assert_eq!(write(&scratch.path("p"), b"x").unwrap_err().code, "not_a_regular_file");
        assert_eq!(write(Path::new("/dev/null"), b"x").unwrap_err().code, "not_a_regular_file");
        assert_eq!(write(&scratch.path(""), b"x").unwrap_err().code, "is_a_directory");
        assert_eq!(write(Path::new("/proc/sys/kernel/hostname"), b"x").unwrap_err().code, "not_a_regular_file");
        assert_eq!(write(Path::new("/proc/self/root/tmp/x"), b"x").unwrap_err().code, "too_many_links");
        write(&scratch.path("f"), b"x").unwrap();
        assert_eq!(write(&scratch.path("f/g"), b"x").unwrap_err().code, "not_a_directory");
    }

    #[test]
    fn an_upload_that_is_given_up_leaves_nothing() {
        let scratch = Scratch::new();
        let mut upload = Upload::begin(&scratch.path("f"), wanted()).unwrap();
        upload.write(&mut [Bytes::from_static(b"half")]).unwrap();
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 1);
        drop(upload);
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 0);
    }

    #[test]
    fn temporary_names_are_known_by_their_look() {
        assert_eq!(Temporary::of(OsStr::new(".sandmill-123.new")), Some(Temporary::New));
        assert_eq!(Temporary::of(OsStr::new(".sandmill-123.old")), Some(Temporary::Replaces));
        assert_eq!(Temporary::of(OsStr::new("x.old")), None);
    }
}
