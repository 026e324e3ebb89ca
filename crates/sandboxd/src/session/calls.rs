//! The calls about sessions.

use std::rc::Rc;

use http::Method;
use sandmill_wire::ApiError;
use serde::{Deserialize, Serialize};

use super::{
    name,
    running::{Ran, Session, SessionBody},
};
use crate::{
    app::App,
    proc::{self, calls::timeout, Command, Cut, Outcome, Program, DEFAULT_OUTPUT_LIMIT_BYTES},
    server::{unknown_call, Blob, Format, Reply, Request},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunBody {
    command: String,
    #[serde(default)]
    timeout_s: Option<f64>,
    #[serde(default)]
    output_limit_bytes: Option<usize>,
}

#[derive(Serialize)]
struct Made {
    session_id: String,
    pid: u32,
}

#[derive(Serialize)]
struct Listing {
    sessions: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    session_id: String,
    pid: u32,
    argv: Vec<String>,
    started_at: f64,
    alive: bool,
    busy: bool,
    result: Option<Outcome>,
}

#[derive(Serialize)]
struct RunResult {
    #[serde(flatten)]
    outcome: Outcome,
    stdout: Blob,
    stderr: Blob,
    stdout_cut: Option<Cut>,
    stderr_cut: Option<Cut>,
    session_alive: bool,
}

/// Answers `sessions` and `sessions/…`.
pub async fn handle(app: Rc<App>, request: Request, rest: &str) -> Result<Reply, ApiError> {
    let format = Format::of(request.headers());
    let method = request.method().clone();
    let (id, call) = rest.split_once('/').unwrap_or((rest, ""));
    match (id, call, &method) {
        ("", "", &Method::POST) => Ok(format.reply(&make(&app, format.read(request).await?).await?)),
        ("", "", &Method::GET) => {
            let sessions = app.sessions.list().iter().map(|(id, session)| listed(id, session)).collect();
            Ok(format.reply(&Listing { sessions }))
        }
        (id, "run", &Method::POST) => {
            let session = app.sessions.get(id)?;
            let body: RunBody = format.read(request).await?;
            let limit = body.output_limit_bytes.unwrap_or(DEFAULT_OUTPUT_LIMIT_BYTES);
            proc::calls::check_output_limit(limit)?;
            let ran = session.run(body.command, timeout(body.timeout_s)?, limit).await?;
            Ok(format.reply(&result(ran)))
        }
        (id, "", &Method::DELETE) => {
            let session = app.sessions.get(id)?;
            let outcome = session.end().await;
            app.sessions.remove(id);
            Ok(format.reply(&outcome))
        }
        _ => Err(unknown_call(&method, request.uri().path())),
    }
}

async fn make(app: &App, body: SessionBody) -> Result<Made, ApiError> {
    let path = match body.shell {
        Some(path) => path,
        None => proc::shell()?.to_owned(),
    };
    let command = Command {
        program: Program::Argv(Vec::new()),
        cwd: body.cwd,
        env: body.env.unwrap_or_default(),
        user: body.user,
    };
    let number = app.sessions.reserve()?;
    let session = Session::start(&app.procs, &path, command).await?;
    let pid = session.shell().pid();
    app.sessions.insert(number, session);
    Ok(Made { session_id: name(number), pid })
}

fn listed(id: &str, session: &Session) -> Listed {
    let about = session.shell().about();
    Listed {
        session_id: id.to_owned(),
        pid: session.shell().pid(),
        argv: about.argv.clone(),
        started_at: about.started_at,
        alive: session.is_alive(),
        busy: session.is_busy(),
        result: session.shell().outcome(),
    }
}

fn result(ran: Ran) -> RunResult {
    let (stdout, stdout_cut) = ran.stdout;
    let (stderr, stderr_cut) = ran.stderr;
    RunResult {
        outcome: ran.outcome,
        stdout: Blob(stdout),
        stderr: Blob(stderr),
        stdout_cut,
        stderr_cut,
        session_alive: ran.alive,
    }
}
