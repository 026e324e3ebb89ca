//! E2B's envd services, on top of [`crate::proc`] and [`crate::files`].
//!
//! Written from E2B's public protocol (its `.proto` files and what its clients expect), so that every E2B client works.
//!
//! - [`connect`], [`failure`], [`wire`]: the Connect protocol. [`process_messages`], [`filesystem_messages`]: what it carries.
//! - [`process`], [`filesystem`], [`watch`], [`watchers`]: the services.
//! - [`contents`], [`multipart`], [`gzip`]: `/files`. [`host`]: `/health`, `/metrics`, `/init`, `/envs`.
//! - [`state`]: defaults that `/init` sets, and who a call's user is.

mod connect;
mod contents;
mod failure;
mod filesystem;
mod filesystem_messages;
mod gzip;
mod host;
mod multipart;
mod process;
mod process_messages;
mod state;
mod watch;
mod watchers;
mod wire;

use std::rc::Rc;

use http::{header, HeaderValue, Method, StatusCode};
use sandmill_wire::ApiError;

pub use self::state::State;
use self::{
    connect::{client_stream, server_stream, unary},
    process_messages::ListRequest,
    state::Caller,
};
use crate::{
    app::App,
    server::{unknown_call, Format, Reply, Request},
};

/// Answers one request to a path outside `/sandmill/v1/`.
pub async fn handle(app: Rc<App>, request: Request) -> Reply {
    let path = request.uri().path().to_owned();
    if path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/") {
        return procedure(app, request, &path).await;
    }
    let answer = match (request.method(), path.as_str()) {
        (&Method::GET, "/health") => return host::health(),
        (&Method::GET, "/metrics") => return host::metrics(&app),
        (&Method::GET, "/envs") => return host::envs(&app),
        (&Method::POST, "/init") => host::init(&app, request).await,
        (&Method::GET, "/files") => contents::download(&app, &request).await,
        (&Method::POST, "/files") => contents::upload(&app, request).await,
        (&Method::POST, "/files/compose") => contents::compose(&app, request).await,
        (method, _) => {
            let error = unknown_call(method, &path);
            return Format::of(request.headers()).error(&error);
        }
    };
    answer.unwrap_or_else(|error: ApiError| host::failure(&error))
}

async fn procedure(app: Rc<App>, request: Request, path: &str) -> Reply {
    if request.method() != Method::POST {
        let mut reply = host::unknown_procedure(path);
        *reply.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return reply;
    }
    let app = &app;
    let caller = |call: &connect::Call| Caller::of(app, &call.headers);
    match path {
        "/process.Process/List" => unary(request, async |_, _: ListRequest| Ok(process::list(app))).await,
        "/process.Process/Start" => {
            let app = Rc::clone(app);
            server_stream(request, async move |call, message, stream| process::start(&app, call, message, stream).await)
                .await
        }
        "/process.Process/Connect" => {
            let app = Rc::clone(app);
            server_stream(request, async move |call, message, stream| {
                process::connect(&app, call, message, stream).await
            })
            .await
        }
        "/process.Process/Update" => unary(request, async |_, message| process::update(app, message).await).await,
        "/process.Process/SendInput" => {
            unary(request, async |_, message| process::send_input(app, message).await).await
        }
        "/process.Process/StreamInput" => {
            client_stream(request, async |_, envelopes| process::stream_input(app, envelopes).await).await
        }
        "/process.Process/SendSignal" => {
            unary(request, async |_, message| process::send_signal(app, message).await).await
        }
        "/process.Process/CloseStdin" => {
            unary(request, async |_, message| process::close_stdin(app, message).await).await
        }
        "/filesystem.Filesystem/Stat" => {
            unary(request, async |call, message| filesystem::stat(app, &caller(call)?, message).await).await
        }
        "/filesystem.Filesystem/MakeDir" => {
            unary(request, async |call, message| filesystem::make_dir(app, &caller(call)?, message).await).await
        }
        "/filesystem.Filesystem/Move" => {
            unary(request, async |call, message| filesystem::rename(app, &caller(call)?, message).await).await
        }
        "/filesystem.Filesystem/ListDir" => {
            unary(request, async |call, message| filesystem::list_dir(app, &caller(call)?, message).await).await
        }
        "/filesystem.Filesystem/Remove" => {
            unary(request, async |call, message| filesystem::remove(&caller(call)?, message).await).await
        }
        "/filesystem.Filesystem/WatchDir" => {
            let app = Rc::clone(app);
            server_stream(request, async move |call, message, stream| {
                watchers::watch_dir(&app, call, message, stream).await
            })
            .await
        }
        "/filesystem.Filesystem/CreateWatcher" => {
            unary(request, async |call, message| watchers::create(app, call, message).await).await
        }
        "/filesystem.Filesystem/GetWatcherEvents" => {
            unary(request, async |_, message| watchers::events(app, message).await).await
        }
        "/filesystem.Filesystem/RemoveWatcher" => {
            unary(request, async |_, message| watchers::remove(app, &message)).await
        }
        _ => host::unknown_procedure(path),
    }
}

/// Whether a request without a token may pass. E2B's signed `/files` URLs are checked by the gateway, which knows the
/// sandbox's token on every way in; a daemon that listens itself accepts the token only.
pub fn signature_allows(_app: &App, _request: &Request) -> bool {
    false
}
