//! One session: its shell, and the command that it runs.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    os::unix::fs::FileExt as _,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags},
    pipe::PipeFlags,
};
use sandmill_wire::ApiError;
use tokio::{
    io::{unix::AsyncFd, Interest},
    sync::oneshot,
};

use super::{
    interrupt::Before,
    shell::{Dialect, ABORT_SIGNAL},
};
use crate::{
    proc::{self, CallUsage, Command, Cut, Keep, Options, Outcome, Process, Program, Reason, Stat, Table},
    sys,
};

/// How long a shell may take until it is ready.
const READY_DEADLINE: Duration = Duration::from_secs(10);
/// How long a shell may take to abandon a command before the session ends.
const ABORT_DEADLINE: Duration = Duration::from_secs(1);
/// How long killing a command's processes may take.
const KILL_DEADLINE: Duration = Duration::from_secs(10);
/// Output of background jobs between two commands that is kept for the next command's output.
const BETWEEN: Keep = Keep::Ends(64 << 10);
/// The lowest number for our side of descriptors that the shell gets under fixed numbers.
const HIGH_FD: i32 = 100;

/// A shell and our ends of its pipes.
pub struct Session {
    shell: Rc<Process>,
    dialect: Dialect,
    script: AsyncFd<File>,
    status: AsyncFd<File>,
    /// bash's commands are handed over in it.
    text: Option<File>,
    /// The shell's /proc/PID/task/PID/children and /proc/PID/stat.
    children: Option<File>,
    stat: Option<File>,
    busy: Cell<bool>,
}

/// What came of a command.
pub struct Ran {
    pub outcome: Outcome,
    pub stdout: (Vec<u8>, Option<Cut>),
    pub stderr: (Vec<u8>, Option<Cut>),
    /// Whether the session takes another command.
    pub alive: bool,
}

/// What ended the wait for a command.
enum End {
    Status(i32),
    ShellEnded,
    Stop(Reason),
}

impl Session {
    /// Starts a shell and waits until it is ready. `command.program` is replaced by the shell at `path`.
    ///
    /// Errors: as [`Table::start`]; 400 `shell_not_usable` when it ends at once or doesn't get ready within ten seconds.
    pub async fn start(procs: &Table, path: &str, mut command: Command) -> Result<Rc<Self>, ApiError> {
        let dialect = Dialect::of(path);
        command.program = Program::Argv(dialect.argv(path));
        let failed = |error: io::Error| {
            ApiError::new(503, "out_of_resources", format!("the session's pipes can't be made: {error}")).retryable()
        };
        let account = procs.account(&command)?;
        let ends = Pipes::make(dialect, &account).map_err(failed)?;
        let numbers = dialect.numbers();
        let mut inherit = vec![(&ends.script_read, numbers.script), (&ends.status_write, numbers.status)];
        if let (Some(text), Some(number)) = (&ends.text_read, numbers.text) {
            inherit.push((text, number));
        }
        let shell = procs.start_with(&command, Options { keep: BETWEEN, ..Options::default() }, &inherit)?;
        let children = File::open(format!("/proc/{pid}/task/{pid}/children", pid = shell.pid())).ok();
        let stat = File::open(format!("/proc/{}/stat", shell.pid())).ok();
        let session = Rc::new(Self {
            dialect,
            script: sys::watch(ends.script_write, Interest::WRITABLE).map_err(failed)?,
            status: sys::watch(ends.status_read, Interest::READABLE).map_err(failed)?,
            text: ends.text.map(File::from),
            children,
            stat,
            busy: Cell::new(false),
            shell,
        });
        session.get_ready(path).await?;
        Ok(session)
    }

    async fn get_ready(&self, path: &str) -> Result<(), ApiError> {
        let ready = tokio::time::timeout(READY_DEADLINE, async {
            tokio::select! {
                biased;
                status = async { self.write(self.dialect.preamble().as_bytes()).await?; self.read_status().await } => {
                    status.is_ok()
                }
                _ = self.shell.wait() => false,
            }
        });
        if ready.await == Ok(true) {
            return Ok(());
        }
        self.shell.kill().await;
        let (said, _) = self.shell.take_output(1);
        let said = String::from_utf8_lossy(&said[..said.len().min(500)]).into_owned();
        Err(ApiError::new(400, "shell_not_usable", format!("{path} did not start as a session's shell: {said}"))
            .hint("bash, dash and busybox's ash are known to work"))
    }

    pub fn shell(&self) -> &Process {
        &self.shell
    }

    /// Whether the shell runs.
    pub fn is_alive(&self) -> bool {
        self.shell.outcome().is_none()
    }

    pub fn is_busy(&self) -> bool {
        self.busy.get()
    }

    /// Ends the shell and everything that it started.
    pub async fn end(&self) -> Outcome {
        self.shell.kill().await
    }

    /// Runs one command. Cancelling it ends the command as its timeout would.
    ///
    /// Errors: 409 `session_busy`; 410 `session_ended`; 400 `invalid_argument` for a NUL in the command.
    pub async fn run(
        self: &Rc<Self>,
        command: String,
        timeout: Option<Duration>,
        output_limit: usize,
    ) -> Result<Ran, ApiError> {
        if command.contains('\0') {
            return Err(proc::invalid("the command holds a NUL byte, which no shell takes"));
        }
        if let Some(outcome) = self.shell.outcome() {
            return Err(ApiError::new(410, "session_ended", "the session's shell has ended")
                .hint("make a new session")
                .details(serde_json::json!(outcome)));
        }
        if self.busy.replace(true) {
            return Err(ApiError::new(409, "session_busy", "the session runs a command")
                .hint("a session runs one command at a time: wait for it, or use another session")
                .retryable());
        }
        // In a task of its own, which sees when this future is dropped and then still cleans up.
        let (gone, left) = oneshot::channel::<()>();
        let session = Rc::clone(self);
        let task = tokio::task::spawn_local(async move {
            let ran = session.run_now(&command, timeout, output_limit, left).await;
            session.busy.set(false);
            ran
        });
        let ran = task.await;
        drop(gone);
        ran.map_err(|error| ApiError::new(500, "internal", format!("the command's task failed: {error}")))
    }

    async fn run_now(
        &self,
        command: &str,
        timeout: Option<Duration>,
        output_limit: usize,
        left: oneshot::Receiver<()>,
    ) -> Ran {
        let started = Instant::now();
        self.shell.drain_nowait();
        self.shell.restart_output(Keep::Ends(output_limit));
        let before = Before::now(self.children.as_ref());
        let ticks = self.cpu_ticks();
        let expire = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        // Without a status the shell is ending, or has exec'ed another program, which may run for long.
        let ask = async {
            match self.ask(command).await {
                Ok(status) => status,
                Err(_) => std::future::pending().await,
            }
        };
        let end = tokio::select! {
            biased;
            status = ask => End::Status(status),
            _ = self.shell.wait() => End::ShellEnded,
            () = expire => End::Stop(Reason::Timeout),
            _ = left => End::Stop(Reason::Killed),
        };
        let (reason, exit_code, output) = match end {
            End::Status(code) => (Reason::Exited, Some(code), self.take_output()),
            End::ShellEnded => {
                let outcome = self.shell.wait().await;
                return self.ran(started, ticks, outcome.reason, outcome.exit_code, self.take_output());
            }
            End::Stop(reason) => (reason, None, self.stop(&before, reason).await),
        };
        let ran = self.ran(started, ticks, reason, exit_code, output);
        self.shell.restart_output(BETWEEN);
        ran
    }

    fn ran(&self, started: Instant, ticks: u64, reason: Reason, exit_code: Option<i32>, output: Output) -> Ran {
        let cpu_ticks = self.cpu_ticks().saturating_sub(ticks);
        let ended = self.shell.outcome();
        let alive = ended.is_none();
        let cpu_s = cpu_ticks as f64 / proc::ticks_per_second() as f64;
        let outcome = Outcome {
            pid: self.shell.pid(),
            exit_code,
            signal: ended.and_then(|outcome| outcome.signal),
            reason,
            duration_s: started.elapsed().as_secs_f64(),
            usage: CallUsage { cpu_s, ..CallUsage::default() },
        };
        let [stdout, stderr] = output;
        Ran { outcome, stdout, stderr, alive }
    }

    /// All output so far: what a command wrote is in the pipes when its status comes.
    fn take_output(&self) -> Output {
        self.shell.drain_nowait();
        [self.shell.take_output(0), self.shell.take_output(1)]
    }

    fn cpu_ticks(&self) -> u64 {
        self.stat.as_ref().and_then(Stat::read).map_or(0, |stat| stat.tree_cpu_ticks)
    }

    /// Has the shell run `command`, and gives its status. An error means that the shell is ending.
    async fn ask(&self, command: &str) -> io::Result<i32> {
        if let Some(text) = &self.text {
            text.write_all_at(command.as_bytes(), 0)?;
            text.set_len(command.len() as u64)?;
        }
        self.write(&self.dialect.line(command)).await?;
        self.read_status().await
    }

    async fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let written = self.script.async_io(Interest::WRITABLE, |mut file| file.write(data)).await?;
            data = &data[written..];
        }
        Ok(())
    }

    /// One line with a number.
    async fn read_status(&self) -> io::Result<i32> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut bytes = [0; 16];
            let count = self.status.async_io(Interest::READABLE, |mut file| file.read(&mut bytes)).await?;
            if count == 0 || line.len() > 64 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            line.extend_from_slice(&bytes[..count]);
        }
        let text = String::from_utf8_lossy(&line);
        text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Ends the running command: kills what it started, and has the shell abandon the rest of it. The session goes on if the
    /// shell answers within a second, else it ends. Gives the output up to the kill.
    async fn stop(&self, before: &Before, reason: Reason) -> Output {
        let pid = self.shell.pid();
        // A stopped shell can't go on to the next command while this one's processes are looked for.
        let _ = sys::send(pid, libc::SIGSTOP);
        let deadline = Instant::now() + KILL_DEADLINE;
        loop {
            let found = before.started_since(&self.shell);
            if found.is_empty() || Instant::now() > deadline || !self.is_alive() {
                break;
            }
            for pid in found {
                let _ = sys::send(pid, libc::SIGKILL);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let output = self.take_output();
        if self.is_alive() {
            let _ = sys::send(pid, ABORT_SIGNAL);
            let _ = sys::send(pid, libc::SIGCONT);
        }
        let answered = tokio::time::timeout(ABORT_DEADLINE, self.read_status()).await;
        if !matches!(answered, Ok(Ok(_))) {
            self.shell.end(reason).await;
            self.shell.wait().await;
        }
        // What the shell says about the kill is noise.
        self.take_output();
        output
    }
}

type Output = [(Vec<u8>, Option<Cut>); 2];

/// The pipes of a new session.
struct Pipes {
    script_read: OwnedFd,
    script_write: OwnedFd,
    status_read: OwnedFd,
    status_write: OwnedFd,
    text: Option<OwnedFd>,
    text_read: Option<OwnedFd>,
}

impl Pipes {
    fn make(dialect: Dialect, account: &proc::Account) -> io::Result<Self> {
        let high = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH_FD);
        let (script_read, script_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (status_read, status_write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // The shell opens its script by a path, as its user.
        proc::give(&script_read, account);
        let (mut text, mut text_read) = (None, None);
        if dialect == Dialect::Bash {
            let memfd = rustix::fs::memfd_create("command", MemfdFlags::CLOEXEC)?;
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memfd));
            let reader = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            rustix::fs::fchmod(&memfd, Mode::from_raw_mode(0o444))?;
            (text, text_read) = (Some(memfd), Some(high(reader)?));
        }
        Ok(Self {
            script_read: high(script_read)?,
            script_write,
            status_read,
            status_write: high(status_write)?,
            text,
            text_read,
        })
    }
}

/// What `sessions` takes.
#[derive(serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
pub struct SessionBody {
    pub shell: Option<String>,
    pub cwd: Option<String>,
    pub env: Option<BTreeMap<String, String>>,
    pub user: Option<String>,
}
