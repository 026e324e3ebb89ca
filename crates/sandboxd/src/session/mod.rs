//! Sessions: shells whose directory, environment, functions and jobs last between commands.

pub mod calls;
mod interrupt;
mod running;
mod shell;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use running::Session;
use sandmill_wire::ApiError;

/// Sessions at once, those included whose shell has ended and that nobody removed.
const SESSION_LIMIT: usize = 256;

/// The sessions of the sandbox, by id.
#[derive(Default)]
pub struct Sessions {
    all: RefCell<BTreeMap<u64, Rc<Session>>>,
    last: Cell<u64>,
}

impl Sessions {
    /// Makes room for one more and gives its number.
    ///
    /// Errors: 429 `session_limit`.
    fn reserve(&self) -> Result<u64, ApiError> {
        let mut all = self.all.borrow_mut();
        if all.len() >= SESSION_LIMIT {
            all.retain(|_, session| session.is_alive());
        }
        if all.len() >= SESSION_LIMIT {
            return Err(ApiError::new(
                429,
                "session_limit",
                format!("the sandbox has {SESSION_LIMIT} sessions already"),
            )
            .hint("delete the ones that are done"));
        }
        self.last.set(self.last.get() + 1);
        Ok(self.last.get())
    }

    fn insert(&self, number: u64, session: Rc<Session>) {
        self.all.borrow_mut().insert(number, session);
    }

    /// Errors: 404 `session_not_found`.
    fn get(&self, id: &str) -> Result<Rc<Session>, ApiError> {
        let found = number(id).and_then(|number| self.all.borrow().get(&number).cloned());
        found.ok_or_else(|| {
            ApiError::new(404, "session_not_found", format!("there is no session {id}"))
                .hint("GET sessions lists what there is; a new one can be made at any time")
        })
    }

    fn remove(&self, id: &str) {
        if let Some(number) = number(id) {
            self.all.borrow_mut().remove(&number);
        }
    }

    fn list(&self) -> Vec<(String, Rc<Session>)> {
        self.all.borrow().iter().map(|(number, session)| (name(*number), Rc::clone(session))).collect()
    }
}

fn name(number: u64) -> String {
    format!("s{number}")
}

fn number(id: &str) -> Option<u64> {
    id.strip_prefix('s')?.parse().ok()
}
