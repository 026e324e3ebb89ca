//! The kernel's descriptor-based mount calls: what libc has no functions for.
//!
//! Unsafe code because these are raw system calls; every function here is safe to call and returns errno.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    os::unix::ffi::OsStrExt,
    path::Path,
};

pub const MOUNT_ATTR_RDONLY: u64 = 0x1;
pub const MOUNT_ATTR_NOSUID: u64 = 0x2;
pub const MOUNT_ATTR_NODEV: u64 = 0x4;
pub const MOUNT_ATTR_NOEXEC: u64 = 0x8;
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
const OPEN_TREE_CLONE: u32 = 1;
const OPEN_TREE_CLOEXEC: u32 = libc::O_CLOEXEC as u32;
const FSOPEN_CLOEXEC: u32 = 1;
const FSMOUNT_CLOEXEC: u32 = 1;
const FSCONFIG_SET_FLAG: u32 = 0;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

pub fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just returned this descriptor to us; nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A private, detached copy of one mount (not of what is mounted below it), rooted at `path`.
pub fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    // SAFETY: `path` is a NUL-terminated string that outlives the call.
    owned(unsafe {
        libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)
    })
}

/// Sets attributes of a detached mount; with a user namespace, its owners are mapped through it.
pub fn set_attributes(mount: BorrowedFd<'_>, set: u64, id_map: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let attr = MountAttr {
        set: set | if id_map.is_some() { MOUNT_ATTR_IDMAP } else { 0 },
        clear: 0,
        propagation: 0,
        userns_fd: id_map.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    // SAFETY: the structure is the kernel's mount_attr, its size is given, and both outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    })
    .map(drop)
}

/// A file system being configured.
pub struct FsContext(OwnedFd);

impl FsContext {
    pub fn open(kind: &CStr) -> io::Result<Self> {
        // SAFETY: a NUL-terminated name.
        owned(unsafe { libc::syscall(libc::SYS_fsopen, kind.as_ptr(), FSOPEN_CLOEXEC) }).map(Self)
    }

    pub fn set(&self, key: &CStr, value: &CStr) -> io::Result<()> {
        // SAFETY: key and value are NUL-terminated and outlive the call.
        check(unsafe {
            libc::syscall(libc::SYS_fsconfig, self.0.as_raw_fd(), FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr(), 0)
        })
        .map(drop)
    }

    pub fn flag(&self, key: &CStr) -> io::Result<()> {
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: the key is NUL-terminated; a flag has no value.
        check(unsafe {
            libc::syscall(libc::SYS_fsconfig, self.0.as_raw_fd(), FSCONFIG_SET_FLAG, key.as_ptr(), none, 0)
        })
        .map(drop)
    }

    /// Makes the file system and gives its detached mount.
    pub fn mount(self, attributes: u64) -> io::Result<OwnedFd> {
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: creating takes neither key nor value.
        check(unsafe { libc::syscall(libc::SYS_fsconfig, self.0.as_raw_fd(), FSCONFIG_CMD_CREATE, none, none, 0) })?;
        // SAFETY: plain numbers.
        owned(unsafe { libc::syscall(libc::SYS_fsmount, self.0.as_raw_fd(), FSMOUNT_CLOEXEC, attributes) })
    }
}

/// Attaches a detached mount at `path`.
pub fn attach(mount: impl AsFd, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    // SAFETY: both strings are NUL-terminated and outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    })
    .map(drop)
}
