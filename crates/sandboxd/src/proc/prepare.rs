//! From what a caller asked to what the kernel takes: all strings, the resolved program, the working directory.

use std::{
    collections::BTreeMap,
    ffi::CString,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{Access, AtFlags, FileType, Mode, OFlags},
    io::Errno,
};
use sandmill_wire::{ApiError, SandboxdConfig};

use super::{
    accounts::{Account, Accounts},
    command::{Command, Program},
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SHELLS: [&str; 2] = ["/bin/bash", "/bin/sh"];

/// A command with everything decided.
pub struct Prepared {
    pub path: CString,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: OwnedFd,
    pub cwd_path: String,
    pub account: Account,
    /// The arguments as they are listed.
    pub shown: Vec<String>,
}

/// Decides everything about `command`. `extra_env` is set last.
///
/// Errors, all 400: `user_not_found`, `cwd_not_found`, `command_not_found`, `command_not_executable`, `shell_not_found`,
/// `invalid_argument`.
pub fn prepare(
    config: &SandboxdConfig,
    accounts: &Accounts,
    command: &Command,
    extra_env: &[(&str, &str)],
) -> Result<Prepared, ApiError> {
    let account = account(config, accounts, command)?;
    let (cwd, cwd_path) = open_cwd(config, command, &account)?;
    let environment = environment(config, command, &account, extra_env);
    let shown = match &command.program {
        Program::Argv(argv) => argv.clone(),
        Program::Shell(line) => vec![shell()?.to_owned(), "-c".to_owned(), line.clone()],
    };
    let Some(program) = shown.first() else {
        return Err(invalid("argv is empty: it needs at least the program"));
    };
    let path = locate(program, environment.get("PATH").copied().unwrap_or(DEFAULT_PATH), &cwd)?;
    let argv = shown.iter().map(|argument| c_string(argument, "an argument")).collect::<Result<_, _>>()?;
    let env = environment.iter().map(|(name, value)| variable(name, value)).collect::<Result<_, _>>()?;
    Ok(Prepared { path, argv, env, cwd, cwd_path, account, shown })
}

/// The account that `command` runs as. Errors: 400 `user_not_found`.
pub fn account(config: &SandboxdConfig, accounts: &Accounts, command: &Command) -> Result<Account, ApiError> {
    accounts.resolve(command.user.as_deref().or(config.user.as_deref()).unwrap_or("root"))
}

fn environment<'a>(
    config: &'a SandboxdConfig,
    command: &'a Command,
    account: &'a Account,
    extra: &[(&'a str, &'a str)],
) -> BTreeMap<&'a str, &'a str> {
    let mut environment: BTreeMap<&str, &str> = BTreeMap::new();
    for layer in [&config.image_env, &config.env] {
        environment.extend(layer.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    }
    let account_env =
        [("HOME", account.home.as_str()), ("USER", &account.name), ("LOGNAME", &account.name), ("PATH", DEFAULT_PATH)];
    for (name, value) in account_env {
        environment.entry(name).or_insert(value);
    }
    environment.extend(command.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    environment.extend(extra.iter().copied());
    environment
}

/// The shell that runs command lines. Errors: 400 `shell_not_found`.
pub fn shell() -> Result<&'static str, ApiError> {
    let found = SHELLS.into_iter().find(|path| rustix::fs::access(*path, Access::EXEC_OK).is_ok());
    found.ok_or_else(|| {
        ApiError::new(400, "shell_not_found", "the image has neither /bin/bash nor /bin/sh")
            .hint("give the command as argv instead of a shell line")
    })
}

fn open_cwd(config: &SandboxdConfig, command: &Command, account: &Account) -> Result<(OwnedFd, String), ApiError> {
    if let Some(path) = command.cwd.as_deref().or(config.workdir.as_deref()) {
        return match open_directory(path) {
            Ok(fd) => Ok((fd, path.to_owned())),
            Err(Errno::INVAL) => Err(invalid("cwd holds a NUL byte")),
            Err(error) => {
                let why = match error {
                    Errno::NOENT => "does not exist".to_owned(),
                    Errno::NOTDIR => "is not a directory".to_owned(),
                    other => format!("can't be entered: {other}"),
                };
                Err(ApiError::new(400, "cwd_not_found", format!("the working directory {path} {why}"))
                    .hint("make it first, or give another cwd; nothing was run"))
            }
        };
    }
    for path in [account.home.as_str(), "/"] {
        if let Ok(fd) = open_directory(path) {
            return Ok((fd, path.to_owned()));
        }
    }
    Err(ApiError::new(500, "cwd_not_found", "the sandbox's root can't be opened"))
}

fn open_directory(path: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// The path to give to execve: relative ones start at `cwd`.
fn locate(program: &str, search: &str, cwd: &OwnedFd) -> Result<CString, ApiError> {
    if program.is_empty() {
        return Err(invalid("the program's name is empty"));
    }
    let not_executable = |path: &str| {
        ApiError::new(400, "command_not_executable", format!("{path} is not an executable file"))
            .hint("chmod +x it, or run it by its interpreter")
    };
    if program.contains('/') {
        let path = c_string(program, "the program's name")?;
        return match executable(cwd, program) {
            Found::Executable => Ok(path),
            Found::Other => Err(not_executable(program)),
            Found::Nothing => Err(not_found(program)),
        };
    }
    let mut other = None;
    for directory in search.split(':') {
        let path = if directory.is_empty() { format!("./{program}") } else { format!("{directory}/{program}") };
        match executable(cwd, &path) {
            Found::Executable => return c_string(&path, "the program's name"),
            Found::Other => other = other.or(Some(path)),
            Found::Nothing => {}
        }
    }
    Err(match other {
        Some(path) => not_executable(&path),
        None => not_found(program).hint("it is in no directory of PATH; give its whole path or set PATH in env"),
    })
}

enum Found {
    Executable,
    Other,
    Nothing,
}

fn executable(cwd: &OwnedFd, path: &str) -> Found {
    match rustix::fs::statat(cwd.as_fd(), path, AtFlags::empty()) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_mode & 0o111 != 0 => Found::Executable,
        Ok(_) => Found::Other,
        Err(_) => Found::Nothing,
    }
}

pub fn not_found(program: &str) -> ApiError {
    ApiError::new(400, "command_not_found", format!("there is no program {program}"))
}

pub fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(400, "invalid_argument", message)
}

fn c_string(text: &str, what: &str) -> Result<CString, ApiError> {
    CString::new(text).map_err(|_| invalid(format!("{what} holds a NUL byte, which no process can be given")))
}

fn variable(name: &str, value: &str) -> Result<CString, ApiError> {
    if name.is_empty() || name.contains('=') {
        return Err(invalid(format!("{name:?} can't be the name of an environment variable")));
    }
    CString::new(format!("{name}={value}"))
        .map_err(|_| invalid(format!("the environment variable {name:?} holds a NUL byte")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(program: Program) -> Command {
        Command { program, cwd: Some("/".into()), env: BTreeMap::new(), user: None }
    }

    fn prepared(command: &Command, config: &SandboxdConfig) -> Result<Prepared, ApiError> {
        prepare(config, &Accounts::default(), command, &[])
    }

    fn env_of(prepared: &Prepared) -> Vec<String> {
        prepared.env.iter().map(|variable| variable.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn the_environment_has_its_order() {
        let mut config = SandboxdConfig::default();
        config.image_env.insert("PATH".into(), "/opt/x/bin:/usr/bin:/bin".into());
        config.image_env.insert("A".into(), "image".into());
        config.env.insert("A".into(), "sandbox".into());
        let mut asked = command(Program::Argv(vec!["true".into()]));
        asked.env.insert("B".into(), "a\nb'\"$x".into());
        let env = env_of(&prepared(&asked, &config).unwrap());
        assert!(env.contains(&"PATH=/opt/x/bin:/usr/bin:/bin".to_owned()));
        assert!(env.contains(&"A=sandbox".to_owned()));
        assert!(env.contains(&"B=a\nb'\"$x".to_owned()));
        assert!(env.contains(&"USER=root".to_owned()));
    }

    #[test]
    fn what_cannot_run_is_said() {
        let code = |command: &Command| prepared(command, &SandboxdConfig::default()).err().unwrap().code;
        assert_eq!(code(&command(Program::Argv(vec!["no-such-program".into()]))), "command_not_found");
        assert_eq!(code(&command(Program::Argv(vec!["/nope".into()]))), "command_not_found");
        assert_eq!(code(&command(Program::Argv(vec!["/etc".into()]))), "command_not_executable");
        assert_eq!(code(&command(Program::Argv(vec![]))), "invalid_argument");
        assert_eq!(code(&command(Program::Argv(vec!["true".into(), "a\0b".into()]))), "invalid_argument");
        let mut elsewhere = command(Program::Argv(vec!["true".into()]));
        elsewhere.cwd = Some("/nope".into());
        assert_eq!(code(&elsewhere), "cwd_not_found");
        let mut variable = command(Program::Argv(vec!["true".into()]));
        variable.env.insert("A=B".into(), String::new());
        assert_eq!(code(&variable), "invalid_argument");
    }
}
