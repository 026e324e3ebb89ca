//! Which call a request is.

use std::rc::Rc;

use http::{header, Method};
use sandmill_wire::ApiError;

use super::{Format, Origin, Reply, Request};
use crate::{app::App, e2b, files, proc, session, tunnel, usage};

/// Paths that report on the sandbox without using it.
const PASSIVE: [&str; 4] = ["/sandmill/v1/activity", "/sandmill/v1/usage", "/health", "/metrics"];

/// Answers one request.
pub async fn route(app: Rc<App>, request: Request, origin: Origin) -> Reply {
    let running = (!PASSIVE.contains(&request.uri().path())).then(|| app.activity.begin());
    if origin == Origin::Network && !allowed(&app, &request) {
        let error = ApiError::new(401, "unauthorized", "the access token is missing or wrong")
            .hint("send the sandbox's access token as X-Access-Token");
        return Format::of(request.headers()).error(&error);
    }
    let mut reply = dispatch(app, request).await;
    if let Some(running) = running {
        reply.body_mut().hold(running);
    }
    reply
}

async fn dispatch(app: Rc<App>, request: Request) -> Reply {
    let format = Format::of(request.headers());
    let path = request.uri().path().to_owned();
    let Some(call) = path.strip_prefix("/sandmill/v1/") else {
        return e2b::handle(app, request).await;
    };
    let (first, rest) = call.split_once('/').unwrap_or((call, ""));
    let answer = match first {
        "exec" | "procs" => proc::calls::handle(app, request, first, rest).await,
        "sessions" => session::calls::handle(app, request, rest).await,
        "files" | "fs" | "tar" => return files::handle(app, request).await,
        "usage" if request.method() == Method::GET => Ok(format.reply(&usage::snapshot(&app))),
        "activity" if request.method() == Method::GET => Ok(Format::Json.reply(&app.activity.report())),
        "tcp" => tunnel::handle(request, rest).await,
        _ => Err(unknown_call(request.method(), &path)),
    };
    answer.unwrap_or_else(|error| format.error(&error))
}

/// The error for a path or method that no call has.
pub fn unknown_call(method: &Method, path: &str) -> ApiError {
    ApiError::new(404, "unknown_call", format!("there is no call {method} {path}"))
        .hint("see docs/reference/protocols.md, section 5; is this sandbox's daemon older than its client?")
}

/// Whether a request from the network may be answered.
fn allowed(app: &App, request: &Request) -> bool {
    let Some(token) = &app.config.token else { return true };
    if request.uri().path() == "/health" {
        return true;
    }
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let shown = headers.get("x-access-token").map(http::HeaderValue::as_bytes).or(bearer);
    match shown {
        Some(shown) => same(shown, token.as_bytes()),
        None => e2b::signature_allows(app, request),
    }
}

/// Compares secrets in a time that depends on their lengths alone.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (x, y)| difference | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::same;

    #[test]
    fn tokens_are_compared_whole() {
        assert!(same(b"abc", b"abc"));
        assert!(!same(b"abc", b"abd"));
        assert!(!same(b"abc", b"ab"));
        assert!(!same(b"", b"a"));
    }
}
