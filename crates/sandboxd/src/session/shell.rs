//! The few lines of shell that make a shell a session.
//!
//! The shell reads its script from a pipe, line by line, so each command runs at the top level of the script, where nothing of
//! ours is in its way: no loop that a `break` could end, no function that would make its variables local. User commands
//! get /dev/null as stdin, and the exit status comes back on a pipe of its own, so the output is the command's, byte for byte.
//!
//! bash reads a pipe byte by byte, so it gets one constant line a command and sources the command's text from a memfd. dash and
//! busybox's ash read blocks and get the text in the line, quoted; `command eval` keeps a syntax error from ending them.
//!
//! [`ABORT_SIGNAL`] abandons the running command, whatever functions and loops it is in, and keeps the shell: in bash, `return`
//! from the sourced text, by a DEBUG trap that lets each function on the way return too; elsewhere, an error that unwinds to
//! the `command eval`. A real-time signal, so that it is in nobody's way.

/// Asks the shell to abandon its command.
pub const ABORT_SIGNAL: i32 = 50;

/// Which dialect a shell is driven in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    Bash,
    Posix,
}

/// The numbers of our pipes in the shell.
pub struct Numbers {
    pub script: i32,
    pub status: i32,
    /// The command's text, read-only; only in bash.
    pub text: Option<i32>,
}

// `__sandmill_end` leaves `$?` as the command did, for the next command to see, unless errexit would take it for a failure.
const BASH: &str = r#"exec 61<&-
BASH_ARGV0=bash
__sandmill_end() {
    __sandmill_status=$?
    builtin printf '%d\n' "$__sandmill_status" >&62
    case $- in *e*) return 0;; esac
    return "$__sandmill_status"
}
__sandmill_skip() {
    case $BASH_COMMAND in __sandmill_end) builtin trap - DEBUG; builtin shopt -u extdebug; return 0;; esac
    return 2
}
__sandmill_abort() { builtin shopt -s extdebug; builtin trap __sandmill_skip DEBUG; }
builtin trap '__sandmill_abort; return 124' 50
__sandmill_end
"#;

// stderr is away for our part of the line, so that `set -x` doesn't show it.
const BASH_LINE: &str = ". /proc/self/fd/63 62>&-;{ __sandmill_end; } 2>/dev/null\n";

const POSIX: &str = r#"exec 8<&-
__sandmill_end() {
    __sandmill_status=$?
    command echo "$__sandmill_status" >&7
    case $- in *e*) return 0;; esac
    return "$__sandmill_status"
}
trap ': "${__sandmill_never?}"' 50
__sandmill_end
"#;

impl Dialect {
    /// That of the shell at `path`, by its name.
    pub fn of(path: &str) -> Self {
        if path.rsplit('/').next() == Some("bash") {
            Self::Bash
        } else {
            Self::Posix
        }
    }

    pub fn numbers(self) -> Numbers {
        match self {
            Self::Bash => Numbers { script: 61, status: 62, text: Some(63) },
            // These shells know one-digit descriptors only; 3, 4, 5 and 9 are the popular ones.
            Self::Posix => Numbers { script: 8, status: 7, text: None },
        }
    }

    pub fn argv(self, path: &str) -> Vec<String> {
        let words: &[&str] = match self {
            Self::Bash => &[path, "--norc", "--noprofile", "/proc/self/fd/61"],
            Self::Posix => &[path, "-c", ". /proc/self/fd/8", "sh"],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    /// The script's beginning; it reports a status when the shell is ready.
    pub fn preamble(self) -> &'static str {
        match self {
            Self::Bash => BASH,
            Self::Posix => POSIX,
        }
    }

    /// The line of the script that runs `command`.
    pub fn line(self, command: &str) -> Vec<u8> {
        match self {
            Self::Bash => BASH_LINE.into(),
            Self::Posix => {
                let quoted = command.replace('\'', r"'\''");
                format!("command eval '{quoted}' 7>&-\n{{ __sandmill_end; }} 2>/dev/null\n").into_bytes()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialects_by_name() {
        assert_eq!(Dialect::of("/usr/bin/bash"), Dialect::Bash);
        assert_eq!(Dialect::of("bash"), Dialect::Bash);
        assert_eq!(Dialect::of("/bin/sh"), Dialect::Posix);
    }

    #[test]
    fn quotes_survive() {
        let line = String::from_utf8(Dialect::Posix.line("echo 'a'")).unwrap();
        assert!(line.contains(r"eval 'echo '\''a'\''' 7>&-"), "{line}");
    }
}
