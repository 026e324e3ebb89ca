//! The floor under Sandmill's figures: what the kernel alone needs.
//!
//! - `sandmill-raw create COUNT [--net]`: clone with user, pid, mount, ipc, uts (and net) namespaces, id maps, one overlay
//!   mount, own /proc, pivot_root, exec of a 4 KiB static program; timed until the exec has happened; killed and reaped
//!   outside the time.
//! - `sandmill-raw spawn COUNT PROGRAM`: posix_spawn and wait of a program, from C's own library.
//!
//! Prints one number a line: milliseconds. Needs root, and nothing but a directory under $TMPDIR.

use std::{
    ffi::CString,
    fs, io,
    io::Write as _,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    time::Instant,
};

/// Host id of the sandbox's root.
const BASE: u32 = 0x3000_0000;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["create", count] => create(count, false),
        ["create", count, "--net"] => create(count, true),
        ["spawn", count, program] => spawn(count, program),
        _ => Err(io::Error::other("usage: sandmill-raw create COUNT [--net] | spawn COUNT PROGRAM")),
    };
    if let Err(error) = outcome {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn number(text: &str) -> io::Result<usize> {
    text.parse().map_err(|_| io::Error::other(format!("{text} is not a count")))
}

fn check(result: libc::c_int, step: &str) -> io::Result<libc::c_int> {
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(error.kind(), format!("{step}: {error}")));
    }
    Ok(result)
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).expect("paths here hold no NUL")
}

/// A static ELF that only pauses: what an exec costs at least.
fn pause_program() -> io::Result<OwnedFd> {
    let code: [u8; 9] = [0xb8, 0x22, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7]; // mov eax, SYS_pause; syscall; jmp back
    let (entry, size) = (0x40_0078_u64, 0x78 + code.len() as u64);
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    elf.extend(2_u16.to_le_bytes()); // executable
    elf.extend(62_u16.to_le_bytes()); // x86-64
    elf.extend(1_u32.to_le_bytes());
    elf.extend(entry.to_le_bytes());
    elf.extend(64_u64.to_le_bytes()); // program headers follow
    elf.extend(0_u64.to_le_bytes());
    elf.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 0, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend(1_u32.to_le_bytes()); // PT_LOAD
    elf.extend(5_u32.to_le_bytes()); // r-x
    for word in [0_u64, 0x40_0000, 0x40_0000, size, size, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(code);
    // SAFETY: the name is a NUL-terminated literal; the returned descriptor is owned by nobody else.
    let fd = unsafe {
        OwnedFd::from_raw_fd(check(libc::memfd_create(c"pause".as_ptr(), libc::MFD_CLOEXEC), "memfd_create")?)
    };
    fs::File::from(fd.try_clone()?).write_all(&elf)?;
    // An executable that is open for writing can't be run: a read-only description of it can.
    let read_only = fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    drop(fd);
    Ok(read_only.into())
}

struct Lab(PathBuf);

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn create(count: &str, net: bool) -> io::Result<()> {
    let count = number(count)?;
    let lab = Lab(std::env::temp_dir().join(format!("sandmill-raw-{}", std::process::id())));
    let root = &lab.0;
    for name in ["lower/proc", "lower/old"] {
        fs::create_dir_all(root.join(name))?;
    }
    let program = pause_program()?;
    let mut times = Vec::with_capacity(count);
    for n in 0..count {
        let own = root.join(format!("s{n}"));
        for name in ["upper", "work", "merged"] {
            fs::create_dir_all(own.join(name))?;
            chown(own.join(name), Some(BASE), Some(BASE))?;
        }
        let options = format!(
            "lowerdir={l},upperdir={u},workdir={w},userxattr",
            l = root.join("lower").display(),
            u = own.join("upper").display(),
            w = own.join("work").display()
        );
        times.push(one_create(&own.join("merged"), &options, &program, net)?);
        fs::remove_dir_all(&own)?;
    }
    for time in times {
        println!("{time:.4}");
    }
    Ok(())
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` is room for two descriptors, which nobody else owns afterwards.
    unsafe {
        check(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), "pipe2")?;
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

fn read_byte(fd: &OwnedFd) -> isize {
    let mut byte = 0_u8;
    // SAFETY: one byte of room for one byte.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut byte).cast(), 1) }
}

fn one_create(merged: &Path, options: &str, program: &OwnedFd, net: bool) -> io::Result<f64> {
    let (go_read, go_write) = pipe()?;
    let (done_read, done_write) = pipe()?;
    let merged = c(merged);
    let options = CString::new(options).expect("options hold no NUL");
    let mut flags =
        libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    if net {
        flags |= libc::CLONE_NEWNET;
    }
    let start = Instant::now();
    // SAFETY: like fork (no shared memory, the child's stack is a copy); this program has one thread, so the child may
    // call anything.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    check(pid, "clone")?;
    if pid == 0 {
        drop(go_write);
        read_byte(&go_read);
        let failed = inside(&merged, &options, program);
        eprintln!("error: {failed}");
        std::process::exit(1);
    }
    drop(done_write);
    let map = format!("0 {BASE} 65536");
    fs::write(format!("/proc/{pid}/uid_map"), &map)?;
    fs::write(format!("/proc/{pid}/gid_map"), &map)?;
    drop(go_write);
    let wrote = read_byte(&done_read); // end of file: the exec closed the child's copy
    let elapsed = start.elapsed().as_secs_f64() * 1000.0;
    let mut status = 0;
    // SAFETY: `pid` is our child and not yet reaped.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        check(libc::waitpid(pid, &raw mut status, 0), "waitpid")?;
    }
    if wrote != 0 || !libc::WIFSIGNALED(status) {
        return Err(io::Error::other("the child failed before its exec"));
    }
    Ok(elapsed)
}

/// In the child: mounts, pivot, exec. Returns only an error.
fn inside(merged: &CString, options: &CString, program: &OwnedFd) -> io::Error {
    let none = std::ptr::null();
    let steps = || -> io::Result<()> {
        // SAFETY: every pointer is a NUL-terminated string that outlives its call, or null where the call allows it.
        unsafe {
            check(libc::setresgid(0, 0, 0), "setresgid")?;
            check(libc::setresuid(0, 0, 0), "setresuid")?;
            check(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()), "private")?;
            check(
                libc::mount(c"overlay".as_ptr(), merged.as_ptr(), c"overlay".as_ptr(), 0, options.as_ptr().cast()),
                "overlay",
            )?;
            check(libc::chdir(merged.as_ptr()), "chdir")?;
            check(libc::mount(c"proc".as_ptr(), c"proc".as_ptr(), c"proc".as_ptr(), 0, none.cast()), "proc")?;
            check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c"old".as_ptr()) as libc::c_int, "pivot_root")?;
            check(libc::umount2(c"/old".as_ptr(), libc::MNT_DETACH), "umount")?;
            let argv = [c"pause".as_ptr(), std::ptr::null()];
            let envp = [std::ptr::null::<libc::c_char>()];
            let fd = program.as_raw_fd();
            let flags = libc::AT_EMPTY_PATH;
            check(
                libc::syscall(libc::SYS_execveat, fd, c"".as_ptr(), argv.as_ptr(), envp.as_ptr(), flags) as libc::c_int,
                "execveat",
            )?;
        }
        Ok(())
    };
    steps().err().unwrap_or_else(|| io::Error::other("exec came back"))
}

fn spawn(count: &str, program: &str) -> io::Result<()> {
    let path = CString::new(program).map_err(io::Error::other)?;
    let argv = [path.as_ptr().cast_mut(), std::ptr::null_mut()];
    let envp = [std::ptr::null_mut::<libc::c_char>()];
    let mut times = Vec::new();
    for _ in 0..number(count)? {
        let (mut pid, mut status) = (0, 0);
        let start = Instant::now();
        // SAFETY: argv and envp end with null and outlive the calls; the child is ours to wait for.
        unsafe {
            let failed = libc::posix_spawn(
                &raw mut pid,
                path.as_ptr(),
                std::ptr::null(),
                std::ptr::null(),
                argv.as_ptr(),
                envp.as_ptr(),
            );
            if failed != 0 {
                return Err(io::Error::from_raw_os_error(failed));
            }
            check(libc::waitpid(pid, &raw mut status, 0), "waitpid")?;
        }
        times.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    for time in times {
        println!("{time:.4}");
    }
    Ok(())
}
