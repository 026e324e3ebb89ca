//! What every call can reach.

use sandmill_wire::SandboxdConfig;

use crate::{activity::Activity, e2b, proc::Table, session::Sessions, tether::Tether};

/// The state of the daemon. One thread owns it; handlers share it as `Rc<App>`.
pub struct App {
    pub config: SandboxdConfig,
    pub procs: Table,
    pub sessions: Sessions,
    pub activity: Activity,
    pub tether: Tether,
    pub e2b: e2b::State,
}
