//! Who we are to a registry: as the call says, else as `docker login` or `podman login` left it.

use base64::{engine::general_purpose::STANDARD, Engine as _};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use serde::Deserialize;

use super::refusal::{Kind, Refusal};

/// The key of Docker Hub in Docker's configuration, from the days of the first protocol.
const DOCKER_HUB: (&str, &str) = ("docker.io", "https://index.docker.io/v1/");

/// Credentials as a call gives them.
#[derive(Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Credentials {
    Password {
        username: String,
        password: String,
    },
    /// A refresh token, as some registries hand out instead of a password.
    Identity {
        identity_token: String,
    },
}

/// Never shows what it holds.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    /// The value of a basic `Authorization` header.
    pub fn basic(&self) -> Option<String> {
        match self {
            Self::Password { username, password } => {
                Some(format!("Basic {}", STANDARD.encode(format!("{username}:{password}"))))
            }
            Self::Identity { .. } => None,
        }
    }
}

/// What the machine's own files and helpers know about `account`, a registry's name. May run a credential helper: blocks.
///
/// Errors: a configuration or helper that is there and fails; having none is not an error.
pub fn stored(account: &str) -> Result<Option<Credentials>, Refusal> {
    let keys: &[&str] = if account == DOCKER_HUB.0 { &[DOCKER_HUB.1, DOCKER_HUB.0] } else { &[account] };
    for key in keys {
        for look in [docker_credential::get_credential, docker_credential::get_podman_credential] {
            match look(key) {
                Ok(DockerCredential::UsernamePassword(username, password)) => {
                    return Ok(Some(Credentials::Password { username, password }));
                }
                Ok(DockerCredential::IdentityToken(identity_token)) => {
                    return Ok(Some(Credentials::Identity { identity_token }));
                }
                Err(
                    CredentialRetrievalError::NoCredentialConfigured
                    | CredentialRetrievalError::ConfigNotFound
                    | CredentialRetrievalError::ConfigReadError,
                ) => {}
                // What a helper prints when it knows nothing of a registry; it is no failure.
                Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("not found") => {}
                Err(error) => {
                    return Err(Refusal::new(Kind::Auth, format!("the stored credentials for {account}: {error}")));
                }
            }
        }
    }
    Ok(None)
}
