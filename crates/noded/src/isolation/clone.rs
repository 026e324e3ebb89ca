//! Starts the child of a create: in new namespaces, born into its cgroup, in our memory on a stack of its own.
//!
//! Unsafe code because of clone itself, and assembler because libc has no clone3, the only call that puts a child into a
//! cgroup without moving it there: a move takes a lock over every fork and exit of the machine and waits, with all other
//! changes of cgroups behind it, until each CPU has passed a quiet state.
#![allow(unsafe_code)]

use std::{
    arch::asm,
    cell::Cell,
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

use super::{
    child::{self, Plan},
    launch::Started,
};

const STACK_BYTES: usize = 32 * 1024;
/// From linux/sched.h; libc's constant doesn't fit its own type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// `struct clone_args` of the kernel, version 2.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Clones a child that runs `plan`. `cgroup`: a directory of the v2 tree; without one the child starts in our own.
///
/// The caller keeps `plan` as it is until the child has left our memory: until its exec or its end.
pub fn clone(plan: &Plan, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Started> {
    let flags = libc::CLONE_VM
        | libc::CLONE_PIDFD
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    // The stack belongs to the child until its exec (or end), which the caller waits for; only then is it given back.
    let stack = Stack::new()?;
    let mut pidfd: RawFd = -1;
    // SAFETY: all signals are blocked around the clone, so that no handler of ours runs in the child before its exec;
    // `run` only reads the plan, whose memory lives until the child has left it; the stack is large enough for `run`,
    // which is shallow, and page-aligned at both ends.
    let result = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let result = match cgroup {
            Some(cgroup) => {
                let args = CloneArgs {
                    flags: flags as u64 | CLONE_INTO_CGROUP,
                    pidfd: (&raw mut pidfd) as u64,
                    exit_signal: libc::SIGCHLD as u64,
                    stack: stack.0 as u64,
                    stack_size: STACK_BYTES as u64,
                    cgroup: cgroup.as_raw_fd() as u64,
                    ..CloneArgs::default()
                };
                call(libc::SYS_clone3, [(&raw const args) as usize, size_of::<CloneArgs>(), 0], plan)
            }
            // Without a group plain clone will do, which container runtimes that forbid clone3 allow.
            None => {
                let flags = flags | libc::SIGCHLD;
                call(libc::SYS_clone, [flags as usize, stack.top() as usize, (&raw mut pidfd) as usize], plan)
            }
        };
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        result
    };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result as i32));
    }
    stack.lend();
    // SAFETY: CLONE_PIDFD wrote a descriptor that nobody else owns.
    Ok(Started { pid: result as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// Calls clone or clone3; the child runs `child::run(plan)` on its new stack.
///
/// # Safety
/// The arguments must describe a child that shares memory with a stack of its own, and `plan` must outlive its use.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: libc::c_long, args: [usize; 3], plan: &Plan) -> isize {
    let result: isize;
    // SAFETY: the registers that hold `plan` and the entry survive the system call in both processes. The parent jumps over
    // the child's part; the child never returns from `run`. The call pushes onto a 16-aligned stack, as the ABI wants.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") number as isize => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") 0,
            in("r8") 0,
            in("r12") child::run as extern "C" fn(*const Plan) -> !,
            in("r13") std::ptr::from_ref(plan),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

#[cfg(target_arch = "aarch64")]
unsafe fn call(number: libc::c_long, args: [usize; 3], plan: &Plan) -> isize {
    let result: isize;
    // SAFETY: as above, with this machine's registers.
    unsafe {
        asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x21",
            "blr x20",
            "brk #1",
            "2:",
            in("x8") number,
            inlateout("x0") args[0] as isize => result,
            in("x1") args[1],
            in("x2") args[2],
            in("x3") 0,
            in("x4") 0,
            in("x20") child::run as extern "C" fn(*const Plan) -> !,
            in("x21") std::ptr::from_ref(plan),
        );
    }
    result
}

/// Memory for a child's stack.
struct Stack(*mut libc::c_void);

thread_local! {
    /// Kept for the next create of the same thread: a thread makes one sandbox at a time, and waits until its child has
    /// exec'ed or is gone.
    static SPARE: Cell<Option<Stack>> = const { Cell::new(None) };
}

impl Stack {
    fn new() -> io::Result<Self> {
        if let Some(spare) = SPARE.take() {
            return Ok(spare);
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping of our own.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), STACK_BYTES, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(base))
    }

    fn top(&self) -> *mut libc::c_void {
        // SAFETY: one past the end of the mapping, where a downward stack begins; page-aligned.
        unsafe { self.0.byte_add(STACK_BYTES) }
    }

    /// Leaves the stack to the child; this thread's next create takes it over.
    fn lend(self) {
        SPARE.set(Some(self));
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: our own mapping of that size; no child runs on it (see SPARE).
        unsafe { libc::munmap(self.0, STACK_BYTES) };
    }
}
