//! `process.Process`: E2B's commands and terminals, on the daemon's process table.

use std::{collections::BTreeMap, pin::pin, rc::Rc, time::Duration};

use super::{
    connect::{late, Call, Envelopes, Stream},
    failure::{Code, Failure},
    process_messages::{
        DataEvent, Empty, EndEvent, Event, EventResponse, Input, ListResponse, Output, ProcessInfo, ProcessInput,
        ProcessSelector, Pty, Selected, Selector, SendInputRequest, SendSignalRequest, StartEvent, StartRequest,
        StreamInput, StreamInputRequest, UpdateRequest,
    },
    state::Caller,
};
use crate::{
    app::App,
    proc::{self, Command, Offsets, Options, Outcome, Process, Program, Reason, Stdin, Subscription},
};

/// What the clients' SDKs run their command lines with.
const SDK_SHELL: &str = "/bin/bash";
/// What stands in for it in an image that has none.
const ANY_SHELL: &str = "/bin/sh";

pub fn list(app: &App) -> ListResponse {
    let running = app.procs.list().into_iter().filter(|process| process.outcome().is_none());
    let info = |process: Rc<Process>| ProcessInfo {
        config: Some(app.e2b.config_of(&process)),
        pid: process.pid(),
        tag: process.about().tag.clone(),
    };
    ListResponse { processes: running.map(info).collect() }
}

/// Starts a process and streams its output. A client that leaves doesn't end it; the call's timeout does, with everything
/// that it started.
pub async fn start(app: &App, call: Call, request: StartRequest, stream: &Stream) -> Result<(), Failure> {
    let process = begin(app, &call, request)?;
    let output = process.subscribe_paced(Offsets::default());
    follow(&process, output, None, call.keepalive(), stream).await
}

fn begin(app: &App, call: &Call, request: StartRequest) -> Result<Rc<Process>, Failure> {
    let config = request.process.unwrap_or_default();
    let caller = Caller::of(app, &call.headers)?;
    let cwd = caller.path(config.cwd.clone().unwrap_or_default())?;
    let cwd = cwd.into_os_string().into_string().map_err(|_| Failure::invalid("cwd is not UTF-8"))?;
    let mut env: BTreeMap<String, String> = app.e2b.defaults().env;
    env.extend(config.envs.clone());
    let account = &caller.account;
    let command = Command {
        program: Program::Argv([&config.cmd].into_iter().chain(&config.args).cloned().collect()),
        cwd: Some(cwd),
        env,
        user: Some(account.name.clone()),
    };
    let options = Options {
        stdin: if request.stdin == Some(false) { Stdin::Null } else { Stdin::Open },
        pty: request.pty.as_ref().map(size),
        tag: request.tag,
        timeout: call.timeout,
        ..Options::default()
    };
    let process = match app.procs.start(&command, options.clone()) {
        // The SDKs name bash; an image without it still has commands to run.
        Err(error) if error.code == "command_not_found" && config.cmd == SDK_SHELL => {
            let argv = [ANY_SHELL.to_owned()].into_iter().chain(config.args.iter().cloned()).collect();
            app.procs.start(&Command { program: Program::Argv(argv), ..command }, options).map_err(|_| error)
        }
        started => started,
    }?;
    app.e2b.remember(&process, config);
    Ok(process)
}

fn size(pty: &Pty) -> proc::Size {
    let size = pty.size.clone().unwrap_or_default();
    let clamp = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
    proc::Size { rows: clamp(size.rows), cols: clamp(size.cols) }
}

/// Streams what a running process says from now on. The call's timeout ends the stream, not the process.
pub async fn connect(app: &App, call: Call, request: Selected, stream: &Stream) -> Result<(), Failure> {
    let process = find(app, request.process)?;
    let output = process.subscribe_paced(process.offsets());
    follow(&process, output, call.timeout, call.keepalive(), stream).await
}

async fn follow(
    process: &Rc<Process>,
    mut output: Subscription,
    timeout: Option<Duration>,
    keepalive: Duration,
    stream: &Stream,
) -> Result<(), Failure> {
    let mut deadline = pin!(tokio::time::sleep(timeout.unwrap_or(Duration::MAX / 4)));
    let mut event = Event::Start(StartEvent { pid: process.pid() });
    loop {
        if !stream.send(&EventResponse::from(event)).await? {
            return Ok(());
        }
        event = tokio::select! {
            biased;
            () = stream.closed() => return Ok(()),
            () = &mut deadline, if timeout.is_some() => return Err(late()),
            next = output.next() => match next {
                Some(proc::Event::Output { stream, data, .. }) => Event::Data(data_event(stream, data)),
                Some(proc::Event::Gap { missing, .. }) => {
                    let message = format!("{missing} bytes of output came faster than this client read them, and are lost");
                    return Err(Failure::new(Code::DataLoss, message));
                }
                Some(proc::Event::End(outcome)) if outcome.reason == Reason::Timeout => return Err(late()),
                Some(proc::Event::End(outcome)) => {
                    stream.send(&EventResponse::from(Event::End(end_event(&outcome)))).await?;
                    return Ok(());
                }
                None => return Ok(()),
            },
            () = tokio::time::sleep(keepalive) => Event::Keepalive(Empty {}),
        };
    }
}

fn data_event(stream: proc::Stream, data: bytes::Bytes) -> DataEvent {
    let output = match stream {
        proc::Stream::Stdout => Output::Stdout(data),
        proc::Stream::Stderr => Output::Stderr(data),
        proc::Stream::Pty => Output::Pty(data),
    };
    DataEvent { output: Some(output) }
}

/// A process that a signal ended has the code that a shell gives it, 128 and the signal's number.
fn end_event(outcome: &Outcome) -> EndEvent {
    let status = match (outcome.reason, outcome.exit_code, outcome.signal) {
        (Reason::Oom, _, _) => "killed: the sandbox's memory limit was reached".to_owned(),
        (_, Some(code), _) => format!("exit status {code}"),
        (_, None, Some(signal)) => format!("signal: {signal}"),
        (_, None, None) => "unknown".to_owned(),
    };
    EndEvent {
        exit_code: outcome.exit_code.or(outcome.signal.map(|signal| 128 + signal)).unwrap_or(-1),
        exited: outcome.exit_code.is_some(),
        error: (outcome.exit_code != Some(0)).then(|| status.clone()),
        status,
    }
}

/// The process that a selector means: one that runs, else one of the latest that ended.
fn find(app: &App, selector: Option<ProcessSelector>) -> Result<Rc<Process>, Failure> {
    match selector.and_then(|selector| selector.selector) {
        Some(Selector::Pid(pid)) => Ok(app.procs.get(pid)?),
        Some(Selector::Tag(tag)) => Ok(app.procs.by_tag(&tag)?),
        None => Err(Failure::invalid("the call doesn't say which process: give its pid or its tag")),
    }
}

fn running(app: &App, selector: Option<ProcessSelector>) -> Result<Rc<Process>, Failure> {
    let process = find(app, selector)?;
    match process.outcome() {
        None => Ok(process),
        Some(_) => Err(Failure::new(Code::NotFound, format!("process {} has ended", process.pid()))),
    }
}

pub async fn update(app: &App, request: UpdateRequest) -> Result<Empty, Failure> {
    let process = running(app, request.process)?;
    if let Some(pty) = &request.pty {
        process.resize(size(pty))?;
    }
    Ok(Empty {})
}

pub async fn send_input(app: &App, request: SendInputRequest) -> Result<Empty, Failure> {
    let process = running(app, request.process)?;
    input(&process, request.input).await?;
    Ok(Empty {})
}

async fn input(process: &Process, input: Option<ProcessInput>) -> Result<(), Failure> {
    let data = match (input.and_then(|input| input.input), process.has_terminal()) {
        (Some(Input::Stdin(data)), false) | (Some(Input::Pty(data)), true) => data,
        (Some(Input::Stdin(_)), true) => {
            return Err(Failure::new(
                Code::FailedPrecondition,
                "the process has a terminal: write to its pty, not stdin",
            ))
        }
        (Some(Input::Pty(_)), false) => {
            return Err(Failure::new(
                Code::FailedPrecondition,
                "the process has no terminal: write to its stdin, not pty",
            ))
        }
        (None, _) => return Err(Failure::invalid("the call holds no input")),
    };
    Ok(process.write_stdin(&data).await?)
}

/// A row of inputs to one process, in order.
pub async fn stream_input(app: &App, envelopes: &mut Envelopes) -> Result<Empty, Failure> {
    let mut process = None;
    while let Some(request) = envelopes.next::<StreamInputRequest>().await? {
        match (request.event, &process) {
            (Some(StreamInput::Start(start)), _) => process = Some(running(app, start.process)?),
            (Some(StreamInput::Data(data)), Some(process)) => input(process, data.input).await?,
            (Some(StreamInput::Data(_)), None) => {
                return Err(Failure::invalid("the first message must say which process"));
            }
            (Some(StreamInput::Keepalive(_)) | None, _) => {}
        }
    }
    Ok(Empty {})
}

pub async fn close_stdin(app: &App, request: Selected) -> Result<Empty, Failure> {
    let process = running(app, request.process)?;
    if process.has_terminal() {
        let message = "a terminal's input can't be closed: send Ctrl-D (0x04)";
        return Err(Failure::new(Code::FailedPrecondition, message));
    }
    process.close_stdin().await?;
    Ok(Empty {})
}

/// SIGKILL ends everything that the process started, and is answered when nothing of it is left; SIGTERM reaches all of it.
pub async fn send_signal(app: &App, request: SendSignalRequest) -> Result<Empty, Failure> {
    let process = running(app, request.process)?;
    match request.signal {
        libc::SIGKILL => {
            process.kill().await;
        }
        libc::SIGTERM => process.signal(libc::SIGTERM, true)?,
        other => {
            let message = format!("signal {other} can't be sent: only SIGTERM and SIGKILL");
            return Err(Failure::new(Code::Unimplemented, message));
        }
    }
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::CallUsage;

    fn ended(exit_code: Option<i32>, signal: Option<i32>, reason: Reason) -> EndEvent {
        end_event(&Outcome { pid: 1, exit_code, signal, reason, duration_s: 0.0, usage: CallUsage::default() })
    }

    #[test]
    fn ends_cannot_be_confused() {
        let end = ended(Some(0), None, Reason::Exited);
        assert_eq!((end.exit_code, end.exited, end.error), (0, true, None));
        assert_eq!(ended(Some(255), None, Reason::Exited).exit_code, 255);
        let end = ended(None, Some(9), Reason::Signaled);
        assert_eq!((end.exit_code, end.exited, end.status.as_str()), (137, false, "signal: 9"));
        assert_eq!(ended(None, Some(11), Reason::Signaled).exit_code, 139);
        assert!(ended(None, Some(9), Reason::Oom).error.unwrap().contains("memory"));
        assert_eq!(ended(None, None, Reason::Killed).exit_code, -1);
    }
}
