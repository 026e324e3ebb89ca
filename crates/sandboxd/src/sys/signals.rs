//! Signals of the daemon itself, and sending them.
#![allow(unsafe_code)] // signal masks, dispositions and signalfd have no safe wrapper

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    ptr,
};

/// The descriptor on which blocked signals arrive.
pub struct Signals(OwnedFd);

/// Sets every signal to its default disposition, so that children begin with defaults whatever this process was started
/// with; blocks SIGPIPE (a write to a closed pipe is an error here, and a child's mask is emptied before its exec) and the
/// signals that [`Signals`] then reports: SIGCHLD, SIGTERM, SIGINT.
///
/// Call it before any thread exists: threads inherit the mask.
pub fn prepare() -> io::Result<Signals> {
    // All zero is the kernel's struct for SIG_DFL, without flags or a mask.
    let default = [0_u64; 4];
    // SAFETY: `default` is as large as the kernel's struct sigaction. It refuses KILL and STOP, which need no change; the
    // raw call reaches the two signals that glibc keeps to itself too, which it uses only once there are threads. The sets
    // are initialised by sigemptyset before they are used.
    let fd = unsafe {
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null::<u64>(), size_of::<u64>());
        }
        let mut reported = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(reported.as_mut_ptr());
        let mut reported = reported.assume_init();
        for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT] {
            libc::sigaddset(&raw mut reported, signal);
        }
        let mut blocked = reported;
        libc::sigaddset(&raw mut blocked, libc::SIGPIPE);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const blocked, ptr::null_mut());
        libc::signalfd(-1, &raw const reported, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor; nobody else owns it.
    Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Keeps every descriptor from 3 on from children, also those that this process was given without being told.
pub fn close_on_exec() {
    // SAFETY: it changes a flag of descriptors, which stay open. Before Linux 5.11 it fails; noded and container runtimes
    // leave no stray descriptor open.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
}

impl Signals {
    /// The next signal that arrived. Error `WouldBlock` when there is none.
    pub fn next(&self) -> io::Result<i32> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` is room for exactly the one record that is asked for.
        let count = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if count != size as isize {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd gives whole records, and the length says that it gave one.
        Ok(unsafe { info.assume_init() }.ssi_signo as i32)
    }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sends a signal, given as its number (real-time signals too), to one process.
pub fn send(pid: u32, signal: i32) -> io::Result<()> {
    let result = match libc::pid_t::try_from(pid) {
        // SAFETY: kill touches no memory of ours. A pid of 0 or below would mean a group, and is refused.
        Ok(pid) if pid > 0 => unsafe { libc::kill(pid, signal) },
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
