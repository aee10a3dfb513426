//! Errors that can occur between a model name and a file. Each message says what the user can do.
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The typed text is not a valid name.
    #[error("{typed}: {problem}")]
    Name { typed: String, problem: String },
    #[error(
        "{repo} is gated: {why}. Accept its terms at {page}, then set HF_TOKEN to a token of that account which may read \
         ({tokens})"
    )]
    Gated { repo: String, page: String, tokens: String, why: String },
    #[error(
        "{endpoint} does not accept the token ({answer}): set HF_TOKEN to a valid one ({tokens}), or unset it"
    )]
    Token { endpoint: String, tokens: String, answer: String },
    #[error("{endpoint} has no repository {repo}, or it is private: check the name{advice}")]
    NoRepository { endpoint: String, repo: String, advice: &'static str },
    #[error("{repo} has no revision {revision}: give a branch, a tag or a commit")]
    NoRevision { repo: String, revision: String },
    /// The repository has no such file or quantisation.
    #[error("{repo} has no {asked}; {there}")]
    NoSuchFile { repo: String, asked: String, there: String },
    /// The repository has no model that kvist can run.
    #[error("{repo} has {what}")]
    NoModel { repo: String, what: String },
    #[error(
        "cannot reach {endpoint}: {cause}. Check the network, HF_ENDPOINT and HTTPS_PROXY; --offline uses what is in the \
         cache, and `kvist models` lists it"
    )]
    Unreachable { endpoint: String, cause: String },
    #[error("{url} answered {status}{answer}")]
    Status { url: String, status: u16, answer: String },
    /// A response of the Hub, or a file of its cache, is malformed.
    #[error("{what}")]
    Answer { what: String },
    #[error("{name} is not in the cache, and --offline or HF_HUB_OFFLINE downloads nothing ({cache}: {there})", cache = cache.display())]
    NotInCache { name: String, cache: PathBuf, there: String },
    #[error(
        "{name} is not downloaded, and its sizes are inside a file of {size}: run it to download it, or plan with \
         the repository that it was made from, whose config.json is enough"
    )]
    TooMuchForASize { name: String, size: String },
    /// [`Progress::accept`](crate::Progress::accept) rejected the model.
    #[error("{name}: {why}. Its weights were not downloaded")]
    NotAccepted { name: String, why: String },
    #[error("{path} has {free} free; {needed} more are needed: free some space, or set HF_HUB_CACHE to another \
             folder", path = path.display())]
    DiskFull { path: PathBuf, needed: String, free: String },
    #[error("{path}: no space is left on the device; the part that has arrived is kept, and the same command continues from it", path = path.display())]
    NoSpaceLeft { path: PathBuf },
    #[error(
        "{file} broke off after {have} of {size} bytes: {cause}. The part that has arrived is kept, and the same command continues from it"
    )]
    BrokeOff { file: String, have: u64, size: u64, cause: String },
    /// The downloaded bytes do not match the Hub's hash; none of them were kept.
    #[error(
        "{file} is damaged: {what}. Nothing of it was kept; try again. If it happens again, the Hub or a proxy is at fault"
    )]
    Damaged { file: String, what: String },
    #[error("{name} does not exist; {there}")]
    NotInStore { name: String, there: String },
    #[error("cannot {verb} {path}: {source}", path = path.display())]
    File { verb: &'static str, path: PathBuf, source: std::io::Error },
}

impl Error {
    pub(crate) fn file(verb: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Error {
        move |source| match source.kind() {
            std::io::ErrorKind::StorageFull => Error::NoSpaceLeft { path: path.into() },
            _ => Error::File { verb, path: path.into(), source },
        }
    }

    /// True if the Hub is unreachable or overloaded (429, 5xx), as opposed to rejecting the request.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Error::Unreachable { .. } | Error::Status { status: 429 | 500.., .. })
    }

    /// True if the name itself is invalid, independent of network and disk.
    pub fn is_wrong_name(&self) -> bool {
        matches!(self, Error::Name { .. })
    }
}

/// The names as a comma-separated list, sorted by similarity to `asked`. At most 12 are shown.
pub(crate) fn closest(asked: &str, names: impl IntoIterator<Item = String>) -> Option<String> {
    const SHOWN: usize = 12;
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort();
    names.dedup();
    let asked = asked.to_lowercase();
    names.sort_by_key(|name| strsim::levenshtein(&asked, &name.to_lowercase()));
    let rest = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    if rest > 0 {
        names.push(format!("and {rest} more"));
    }
    (!names.is_empty()).then(|| names.join(", "))
}

/// Formats a number of bytes in a readable unit.
pub(crate) fn human(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_names_come_first() {
        let names = ["Q8_0", "Q4_K_S", "F16"].map(String::from);
        assert_eq!(closest("q4_k_m", names).unwrap(), "Q4_K_S, Q8_0, F16");
        assert_eq!(closest("x", []), None);
        let many = closest("a", (0..20).map(|i| format!("file{i}"))).unwrap();
        assert!(many.ends_with("and 8 more"), "{many}");
        assert_eq!([human(5), human(1536), human(3 << 30)], ["5 B", "1.5 KiB", "3.0 GiB"]);
    }
}
