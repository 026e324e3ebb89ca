//! The system-call filter: Docker's default profile for its fourteen default capabilities, plus `clone3` for sandboxd (which
//! denies it to every process it starts).
//!
//! An allow-list, everything else answers EPERM. Allowed numbers are merged into ranges and found by binary search, so a
//! call costs about ten instructions, whichever it is, and the program has a few hundred, not thousands.

use libc::sock_filter as Instruction;

use super::syscalls;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const IF_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const IF_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const REFUSE: u32 = 0x0005_0000 | libc::EPERM as u32;

/// Offsets into `struct seccomp_data`; arguments are little-endian, the low half first.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGUMENT_0: u32 = 16;

#[cfg(target_arch = "x86_64")]
const OUR_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OUR_ARCH: u32 = 0xc000_00b7;

/// Namespace flags of clone(2): CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}.
const NAMESPACES: u32 = 0x7e02_0000;
/// What Docker lets personality(2) set.
const PERSONALITIES: [u32; 5] = [0, 8, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// The whole filter; the same for every sandbox, made once.
pub fn compile() -> Vec<Instruction> {
    let mut program = vec![
        op(LOAD, ARCH),
        test(IF_EQUAL, OUR_ARCH, 1, 0),
        op(RETURN, KILL_PROCESS), // 32-bit calls of a 64-bit kernel have other numbers
        op(LOAD, NUMBER),
    ];
    // The conditional ones first: they end in a verdict of their own.
    let clone =
        [op(LOAD, ARGUMENT_0), op(AND, NAMESPACES), test(IF_EQUAL, 0, 0, 1), op(RETURN, ALLOW), op(RETURN, REFUSE)];
    conditional(&mut program, libc::SYS_clone, &clone);
    let socket =
        [op(LOAD, ARGUMENT_0), test(IF_EQUAL, libc::AF_VSOCK as u32, 1, 0), op(RETURN, ALLOW), op(RETURN, REFUSE)];
    conditional(&mut program, libc::SYS_socket, &socket);
    let mut personality = vec![op(LOAD, ARGUMENT_0)];
    for (index, allowed) in PERSONALITIES.iter().enumerate() {
        personality.push(test(IF_EQUAL, *allowed, (PERSONALITIES.len() - index) as u8, 0));
    }
    personality.extend([op(RETURN, REFUSE), op(RETURN, ALLOW)]);
    conditional(&mut program, libc::SYS_personality, &personality);
    search(&mut program, &ranges(syscalls::ALLOWED));
    program
}

fn op(code: u16, k: u32) -> Instruction {
    Instruction { code, jt: 0, jf: 0, k }
}

fn test(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn conditional(program: &mut Vec<Instruction>, number: libc::c_long, verdict: &[Instruction]) {
    program.push(test(IF_EQUAL, number as u32, 0, verdict.len() as u8));
    program.extend_from_slice(verdict);
}

/// Sorted, merged `[first, last]` ranges.
fn ranges(numbers: &[libc::c_long]) -> Vec<(u32, u32)> {
    let mut numbers: Vec<u32> = numbers.iter().map(|number| *number as u32).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

/// Binary search by comparison: at a leaf one range is left.
fn search(program: &mut Vec<Instruction>, ranges: &[(u32, u32)]) {
    match ranges {
        [] => program.push(op(RETURN, REFUSE)),
        [(first, last)] => program.extend([
            test(IF_AT_LEAST, *first, 0, 2),
            test(IF_AT_LEAST, last + 1, 1, 0),
            op(RETURN, ALLOW),
            op(RETURN, REFUSE),
        ]),
        _ => {
            let (low, high) = ranges.split_at(ranges.len() / 2);
            let mut lower = Vec::new();
            search(&mut lower, low);
            // A conditional jump reaches 255 instructions at most, a plain one any distance.
            program.push(test(IF_AT_LEAST, high[0].0, 0, 1));
            program.push(op(JUMP, lower.len() as u32));
            program.append(&mut lower);
            search(program, high);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the program as the kernel does.
    fn verdict(arch: u32, number: libc::c_long, argument_0: u32) -> u32 {
        let program = compile();
        let (mut accumulator, mut at) = (0, 0);
        loop {
            let Instruction { code, jt, jf, k } = program[at];
            at += 1;
            match code {
                LOAD => {
                    accumulator = match k {
                        NUMBER => number as u32,
                        ARCH => arch,
                        ARGUMENT_0 => argument_0,
                        _ => panic!("load of {k}"),
                    }
                }
                AND => accumulator &= k,
                JUMP => at += k as usize,
                IF_EQUAL => at += usize::from(if accumulator == k { jt } else { jf }),
                IF_AT_LEAST => at += usize::from(if accumulator >= k { jt } else { jf }),
                RETURN => return k,
                _ => panic!("code {code}"),
            }
        }
    }

    #[test]
    fn exactly_the_allowed_numbers() {
        let special = [libc::SYS_clone, libc::SYS_socket, libc::SYS_personality];
        for number in 0..1024 {
            if special.contains(&number) {
                continue;
            }
            let expected = if syscalls::ALLOWED.contains(&number) { ALLOW } else { REFUSE };
            assert_eq!(verdict(OUR_ARCH, number, 0), expected, "{number}");
        }
        assert_eq!(verdict(OUR_ARCH, 0x4000_0000, 0), REFUSE, "x32");
    }

    #[test]
    fn arguments_count() {
        assert_eq!(verdict(OUR_ARCH, libc::SYS_clone, libc::CLONE_VM as u32 | 17), ALLOW);
        for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWCGROUP, libc::CLONE_NEWNET] {
            assert_eq!(verdict(OUR_ARCH, libc::SYS_clone, flag as u32), REFUSE);
        }
        assert_eq!(verdict(OUR_ARCH, libc::SYS_socket, libc::AF_INET as u32), ALLOW);
        assert_eq!(verdict(OUR_ARCH, libc::SYS_socket, libc::AF_VSOCK as u32), REFUSE);
        for allowed in PERSONALITIES {
            assert_eq!(verdict(OUR_ARCH, libc::SYS_personality, allowed), ALLOW);
        }
        assert_eq!(verdict(OUR_ARCH, libc::SYS_personality, 0x40_0000), REFUSE);
        assert_eq!(verdict(0x4000_0003, 1, 0), KILL_PROCESS);
    }

    #[test]
    fn it_is_small() {
        assert!(compile().len() < 400, "{}", compile().len());
    }
}
