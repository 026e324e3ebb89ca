//! The calls about sessions.

use std::rc::Rc;

use sandmill_wire::ApiError;

use crate::{
    app::App,
    server::{unknown_call, Reply, Request},
};

/// Answers `sessions` and `sessions/…`.
pub async fn handle(app: Rc<App>, request: Request, _rest: &str) -> Result<Reply, ApiError> {
    let _ = &app.sessions;
    Err(unknown_call(request.method(), request.uri().path()))
}
