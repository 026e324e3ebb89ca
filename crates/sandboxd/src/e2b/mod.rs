//! E2B's envd services, on top of [`crate::proc`] and [`crate::files`].

use std::rc::Rc;

use sandmill_wire::ApiError;

use crate::{
    app::App,
    server::{Format, Reply, Request},
};

/// Answers one request to a path outside `/sandmill/v1/`.
pub async fn handle(_app: Rc<App>, request: Request) -> Reply {
    let error = ApiError::new(404, "unknown_call", format!("there is no call {}", request.uri().path()));
    Format::of(request.headers()).error(&error)
}

/// Whether a request without a token carries E2B's signature of a `/files` URL.
pub fn signature_allows(_app: &App, _request: &Request) -> bool {
    false
}
