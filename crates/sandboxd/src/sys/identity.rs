//! Looking at files with another user's identity.
#![allow(unsafe_code)] // setfsuid and setfsgid have no safe wrapper

/// Runs `look` with the file system identity of `uid` and `gid` on this thread.
///
/// /proc/PID/environ of another user's process is closed to a root without CAP_SYS_PTRACE, but open to that user.
pub fn as_user<T>(uid: u32, gid: u32, look: impl FnOnce() -> T) -> T {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: as below; this thread's own identity is root's.
            unsafe {
                libc::setfsuid(0);
                libc::setfsgid(0);
            }
        }
    }
    let _restore = Restore;
    // SAFETY: both calls change this thread's file system identity only, and touch no memory. Where they are refused, the
    // identity stays as it is.
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
    }
    look()
}
