//! The calls about processes: `exec` and `procs`.

use std::{collections::BTreeMap, io, rc::Rc, time::Duration};

use http::Method;
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use super::{
    command::{Command, Options, Program, Size, Stdin, DEFAULT_OUTPUT_LIMIT_BYTES},
    frames,
    outcome::{Outcome, Reason},
    output::{Cut, Keep},
    prepare::invalid,
    process::Process,
    subscription::Offsets,
};
use crate::{
    app::App,
    server::{no_content, unknown_call, Blob, Format, Query, Reply, ReplyBody, Request},
};

/// Longest output limit of an exec: two streams of it must fit into one answer.
const OUTPUT_LIMIT_MAX_BYTES: usize = 512 << 20;
/// How often a stream without output says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// How long a process that was started for a paced reader waits for it to come.
const FIRST_READER: Duration = Duration::from_secs(10);

/// `Exec` of the contract, with what `procs` adds.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct ExecBody {
    argv: Option<Vec<String>>,
    shell: Option<String>,
    cwd: Option<String>,
    env: Option<BTreeMap<String, String>>,
    user: Option<String>,
    stdin: Option<Blob>,
    timeout_s: Option<f64>,
    output_limit_bytes: Option<usize>,
    pty: Option<Size>,
    tag: Option<String>,
    keep_stdin: bool,
    /// It waits for the reader of its output, from the start on.
    paced: bool,
}

/// `Result` of the contract.
#[derive(Serialize)]
pub struct ExecResult {
    #[serde(flatten)]
    outcome: Outcome,
    stdout: Blob,
    stderr: Blob,
    stdout_cut: Option<Cut>,
    stderr_cut: Option<Cut>,
}

#[derive(Serialize)]
struct Started {
    pid: u32,
}

#[derive(Serialize)]
struct Listing {
    procs: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    pid: u32,
    argv: Vec<String>,
    cwd: String,
    tag: Option<String>,
    pty: bool,
    started_at: f64,
    running: bool,
    result: Option<Outcome>,
}

#[derive(Deserialize)]
struct SignalBody {
    signal: i32,
    #[serde(default)]
    tree: bool,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct WaitBody {
    timeout_s: Option<f64>,
}

/// Answers `exec`, `procs` and `procs/…`.
pub async fn handle(app: Rc<App>, request: Request, first: &str, rest: &str) -> Result<Reply, ApiError> {
    let format = Format::of(request.headers());
    let method = request.method().clone();
    let (pid, call) = rest.split_once('/').unwrap_or((rest, ""));
    match (first, pid, call, &method) {
        ("exec", "", "", &Method::POST) => {
            let body = format.read(request).await?;
            Ok(format.reply(&exec(&app, body).await?))
        }
        ("procs", "", "", &Method::POST) => {
            let body: ExecBody = format.read(request).await?;
            let paced = body.paced;
            let (command, options) = body.into_start(None)?;
            let process = app.procs.start(&command, options)?;
            if paced {
                wait_for_first_reader(&process);
            }
            Ok(format.reply(&Started { pid: process.pid() }))
        }
        ("procs", "", "", &Method::GET) => {
            Ok(format.reply(&Listing { procs: app.procs.list().iter().map(listed).collect() }))
        }
        ("procs", pid, call, method) => {
            let process = app.procs.get(pid.parse().map_err(|_| invalid(format!("{pid} is not a pid")))?)?;
            match (call, method) {
                ("", &Method::DELETE) => Ok(format.reply(&process.kill().await)),
                ("output", &Method::GET) => follow(&process, &Query::of(request.uri())),
                ("stdin", &Method::POST) => write_stdin(&process, request).await,
                ("signal", &Method::POST) => {
                    let body: SignalBody = format.read(request).await?;
                    process.signal(body.signal, body.tree)?;
                    Ok(no_content())
                }
                ("resize", &Method::POST) => {
                    process.resize(format.read(request).await?)?;
                    Ok(no_content())
                }
                ("wait", &Method::POST) => {
                    let body: WaitBody = format.read(request).await?;
                    Ok(format.reply(&wait(&process, body.timeout_s).await?))
                }
                _ => Err(unknown_call(method, request.uri().path())),
            }
        }
        _ => Err(unknown_call(&method, request.uri().path())),
    }
}

async fn exec(app: &App, body: ExecBody) -> Result<ExecResult, ApiError> {
    if body.pty.is_some() || body.keep_stdin || body.tag.is_some() || body.paced {
        return Err(invalid("exec takes no pty, tag, keep_stdin or paced").hint("start it with POST procs"));
    }
    let limit = body.output_limit_bytes.unwrap_or(DEFAULT_OUTPUT_LIMIT_BYTES);
    check_output_limit(limit)?;
    let (command, options) = body.into_start(Some(limit))?;
    let process = app.procs.start(&command, options)?;
    let watched = KillOnDrop(Some(Rc::clone(&process)));
    let outcome = process.wait().await;
    watched.forgive();
    Ok(result(outcome, &process))
}

/// The result of a process with all of its kept output.
pub fn result(outcome: Outcome, process: &Process) -> ExecResult {
    let (stdout, stdout_cut) = process.take_output(0);
    let (stderr, stderr_cut) = process.take_output(1);
    ExecResult { outcome, stdout: Blob(stdout), stderr: Blob(stderr), stdout_cut, stderr_cut }
}

/// Kills what an exec started when its client leaves, which drops the call's future.
struct KillOnDrop(Option<Rc<Process>>);

impl KillOnDrop {
    fn forgive(mut self) {
        self.0 = None;
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(process) = self.0.take() {
            tokio::task::spawn_local(async move { process.end(Reason::Killed).await });
        }
    }
}

fn listed(process: &Rc<Process>) -> Listed {
    let about = process.about();
    let result = process.outcome();
    Listed {
        pid: process.pid(),
        argv: about.argv.clone(),
        cwd: about.cwd.clone(),
        tag: about.tag.clone(),
        pty: process.has_terminal(),
        started_at: about.started_at,
        running: result.is_none(),
        result,
    }
}

/// A process that is started for a paced reader waits for it where it would run away, for ten seconds at most.
fn wait_for_first_reader(process: &Rc<Process>) {
    let place = process.subscribe_paced(Offsets::default());
    let process = Rc::clone(process);
    tokio::task::spawn_local(async move {
        let _ = tokio::time::timeout(FIRST_READER, process.wait_for_paced_readers(2)).await;
        drop(place);
    });
}

/// Streams frames; with `follow=0` only what is there already.
fn follow(process: &Rc<Process>, query: &Query) -> Result<Reply, ApiError> {
    let from = Offsets {
        stdout: query.number("stdout_offset")?.unwrap_or(0),
        stderr: query.number("stderr_offset")?.unwrap_or(0),
    };
    let follow = query.flag("follow", true)?;
    let paced = query.flag("paced", false)?;
    let mut subscription = if paced { process.subscribe_paced(from) } else { process.subscribe(from) };
    let (sender, body) = ReplyBody::channel(4);
    tokio::task::spawn_local(async move {
        loop {
            let frame = if follow {
                match tokio::time::timeout(KEEP_ALIVE, subscription.next()).await {
                    Ok(Some(event)) => frames::event(&event),
                    Ok(None) => return,
                    Err(_) => frames::keep_alive(),
                }
            } else {
                match subscription.next_nowait() {
                    Some(event) => frames::event(&event),
                    None => return,
                }
            };
            if sender.send(Ok(frame.into())).await.is_err() {
                return;
            }
        }
    });
    let mut reply = Reply::new(body);
    reply
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/vnd.sandmill.frames"));
    Ok(reply)
}

async fn write_stdin(process: &Process, request: Request) -> Result<Reply, ApiError> {
    use http_body_util::BodyExt as _;
    let eof = Query::of(request.uri()).flag("eof", false)?;
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error: hyper::Error| {
            ApiError::new(400, "body_incomplete", format!("the input broke off: {error}"))
                .details(serde_json::json!({ "cause": io::ErrorKind::UnexpectedEof.to_string() }))
        })?;
        if let Ok(data) = frame.into_data() {
            process.write_stdin(&data).await?;
        }
    }
    if eof {
        process.close_stdin().await?;
    }
    Ok(no_content())
}

async fn wait(process: &Process, timeout_s: Option<f64>) -> Result<Outcome, ApiError> {
    match timeout(timeout_s)? {
        None => Ok(process.wait().await),
        Some(timeout) => tokio::time::timeout(timeout, process.wait()).await.map_err(|_| {
            ApiError::new(408, "wait_timeout", format!("process {} still runs", process.pid()))
                .hint("wait again, or kill it")
                .retryable()
        }),
    }
}

/// Errors: 400 `invalid_argument` for a limit beyond half a GiB.
pub fn check_output_limit(limit: usize) -> Result<(), ApiError> {
    if limit > OUTPUT_LIMIT_MAX_BYTES {
        return Err(invalid(format!("output_limit_bytes may be {OUTPUT_LIMIT_MAX_BYTES} at most"))
            .hint("write more output to a file, or follow it with procs/{pid}/output"));
    }
    Ok(())
}

/// A timeout of the wire: none and 0 mean no limit.
///
/// Errors: 400 `invalid_argument` for one that is negative or not a number.
pub fn timeout(timeout_s: Option<f64>) -> Result<Option<Duration>, ApiError> {
    match timeout_s {
        None => Ok(None),
        Some(0.0) => Ok(None),
        // Longer than any sandbox lives, and short enough for the clock's arithmetic.
        Some(seconds) if seconds > 0.0 => Ok(Some(Duration::from_secs_f64(seconds.min(1e9)))),
        Some(seconds) => Err(invalid(format!("timeout_s is {seconds}")).hint("leave it out, or give 0, for no limit")),
    }
}

impl ExecBody {
    /// `limit`: of each stream of an exec's output; None keeps the latest for replay.
    fn into_start(self, limit: Option<usize>) -> Result<(Command, Options), ApiError> {
        let program = match (self.argv, self.shell) {
            (Some(argv), None) => Program::Argv(argv),
            (None, Some(line)) => Program::Shell(line),
            _ => return Err(invalid("give exactly one of argv and shell")),
        };
        let stdin = match (self.stdin, self.keep_stdin) {
            (Some(_), true) => {
                return Err(invalid("give stdin or keep_stdin, not both").hint("write the first input as later input"))
            }
            (Some(Blob(bytes)), false) => Stdin::Bytes(bytes.into()),
            (None, true) => Stdin::Open,
            (None, false) => Stdin::Null,
        };
        let command = Command { program, cwd: self.cwd, env: self.env.unwrap_or_default(), user: self.user };
        let keep = limit.map_or_else(Keep::default, Keep::Ends);
        Ok((command, Options { stdin, pty: self.pty, tag: self.tag, timeout: timeout(self.timeout_s)?, keep }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_the_wire() {
        assert_eq!(timeout(None).unwrap(), None);
        assert_eq!(timeout(Some(0.0)).unwrap(), None);
        assert_eq!(timeout(Some(0.5)).unwrap(), Some(Duration::from_millis(500)));
        assert!(timeout(Some(f64::INFINITY)).unwrap().is_some());
        assert!(timeout(Some(-1.0)).is_err());
        assert!(timeout(Some(f64::NAN)).is_err());
    }

    #[test]
    fn a_body_names_one_program() {
        let start = |json: &str| serde_json::from_str::<ExecBody>(json).unwrap().into_start(Some(1));
        assert!(start(r#"{"argv":["true"]}"#).is_ok());
        assert!(start(r#"{"shell":"true"}"#).is_ok());
        assert!(start(r#"{"shell":"true","argv":["true"]}"#).is_err());
        assert!(start("{}").is_err());
    }
}
