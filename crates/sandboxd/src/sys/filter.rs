//! The filter that keeps `clone3` from the sandbox's processes.
//!
//! The sandbox's big filter (noded's, or a container runtime's) judges clone's flags; those of clone3 lie in memory, where no
//! filter can look. So clone3 is answered with ENOSYS, upon which libc uses clone. This daemon itself needs clone3, to start
//! children inside a cgroup. A filter for each child would cost a tenth of its spawn; instead one filter covers the daemon
//! and all that it starts, and lets a clone3 pass that carries a secret of 128 bits in the two registers after its
//! arguments, which the kernel ignores. The secret is known to this daemon's memory (which is not dumpable) and to the kernel.
#![allow(unsafe_code)] // installing a filter has no safe wrapper

use std::io;

use rustix::rand::GetRandomFlags;

/// What a clone3 of this process must carry; zeros where no filter is installed.
#[derive(Clone, Copy, Default)]
pub struct Secret(pub [u64; 2]);

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGUMENTS: u32 = 16;

/// Installs the filter, for good, on this process and all its descendants. Needs no_new_privs, and to be the only thread.
///
/// Errors: the kernel's; ENOSYS or EINVAL where it has no seccomp.
pub fn deny_clone3() -> io::Result<Secret> {
    let mut secret = Secret::default();
    for half in &mut secret.0 {
        let mut bytes = [0; 8];
        // Without randomness the secret would be one that can be guessed.
        if rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())? != bytes.len() {
            return Err(io::Error::other("no randomness"));
        }
        *half = u64::from_ne_bytes(bytes);
    }
    let mut program = program(secret);
    let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: `fprog` and the instructions it points to live through the call, which copies them.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const fprog) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(secret)
}

fn program(secret: Secret) -> Vec<libc::sock_filter> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // The third and fourth argument, word by word; both machines are little-endian.
    let words: Vec<(u32, u32)> = secret
        .0
        .iter()
        .enumerate()
        .flat_map(|(index, half)| {
            let offset = ARGUMENTS + 8 * (2 + index as u32);
            [(offset, *half as u32), (offset + 4, (*half >> 32) as u32)]
        })
        .collect();
    let checks = 2 * words.len() as u8;
    // Other machines' calls (the big filter's matter) and other calls jump over the checks to the first return.
    let mut program = vec![
        step(LOAD, 0, 0, ARCH),
        step(JUMP_EQUAL, 0, checks + 2, AUDIT_ARCH),
        step(LOAD, 0, 0, NUMBER),
        step(JUMP_EQUAL, 0, checks, libc::SYS_clone3 as u32),
    ];
    for (index, (offset, word)) in words.iter().enumerate() {
        // Over the checks that are left and the first return.
        let to_denial = checks - 2 * (index as u8 + 1) + 1;
        program.push(step(LOAD, 0, 0, *offset));
        program.push(step(JUMP_EQUAL, 0, to_denial, *word));
    }
    program.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    program.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the program answers to a call.
    fn run(program: &[libc::sock_filter], arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(arch.to_le_bytes());
        data.extend(0_u64.to_le_bytes());
        arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
        let (mut at, mut value) = (0, 0);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) & 7 {
                libc::BPF_LD => {
                    let from = step.k as usize;
                    value = u32::from_le_bytes(data[from..from + 4].try_into().unwrap());
                }
                libc::BPF_JMP => at += usize::from(if value == step.k { step.jt } else { step.jf }),
                _ => return step.k,
            }
        }
    }

    #[test]
    fn only_a_clone3_with_the_secret_passes() {
        let program = program(Secret([0x1111_2222_3333_4444, 0x5555_6666_7777_8888]));
        let clone3 = libc::SYS_clone3 as u32;
        let denied = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        let with = |third, fourth| [1, 2, third, fourth, 5, 6];
        let good = with(0x1111_2222_3333_4444, 0x5555_6666_7777_8888);
        assert_eq!(run(&program, AUDIT_ARCH, clone3, good), libc::SECCOMP_RET_ALLOW);
        for bad in [
            with(0, 0),
            with(0x1111_2222_3333_4445, 0x5555_6666_7777_8888),
            with(0x1111_2223_3333_4444, 0x5555_6666_7777_8888),
            with(0x1111_2222_3333_4444, 0x5555_6666_7777_8889),
            with(0x1111_2222_3333_4444, 0x5555_6667_7777_8888),
        ] {
            assert_eq!(run(&program, AUDIT_ARCH, clone3, bad), denied);
        }
        assert_eq!(run(&program, AUDIT_ARCH, libc::SYS_read as u32, with(0, 0)), libc::SECCOMP_RET_ALLOW);
        assert_eq!(run(&program, 3, clone3, with(0, 0)), libc::SECCOMP_RET_ALLOW);
    }
}
