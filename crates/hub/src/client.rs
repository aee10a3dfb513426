//! HTTP client for the Hub. It follows redirects itself, one by one: the first response carries the file's
//! hash, and the token must not be sent on to the host that stores the bytes.
use crate::cache::is_commit;
use crate::name::is_safe_path;
use crate::{Error, HubName, Settings};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// The files of a repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Facts>,
}

/// Size and hash of a file as the Hub reports them before the download.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) size: Option<u64>,
    pub(crate) hash: Option<Hash>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    /// SHA-256 of a file in large file storage.
    Sha256(String),
    /// Git blob id of a file in git.
    Git(String),
}

impl Hash {
    fn parse(text: &str) -> Option<Hash> {
        let text = text.trim().trim_start_matches("W/").trim_matches('"').to_lowercase();
        match (text.len(), text.bytes().all(|b| b.is_ascii_hexdigit())) {
            (64, true) => Some(Hash::Sha256(text)),
            (40, true) => Some(Hash::Git(text)),
            _ => None,
        }
    }
    pub(crate) fn hex(&self) -> &str {
        match self {
            Hash::Sha256(hex) | Hash::Git(hex) => hex,
        }
    }
}

/// A file to download, with its known size and hash.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) hash: Hash,
    pub(crate) url: String,
}

impl Listing {
    pub(crate) fn paths(&self) -> Vec<&str> {
        self.files.keys().map(String::as_str).collect()
    }
}

pub(crate) struct Client<'a> {
    agent: Agent,
    settings: &'a Settings,
}

/// Limit on the size of a file listing, in bytes.
const MAX_LISTING_BYTES: u64 = 64 << 20;
const MAX_REDIRECTS: usize = 8;

impl<'a> Client<'a> {
    pub(crate) fn new(settings: &'a Settings) -> Result<Self, Error> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("kvist/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(Duration::from_secs(10)))
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_per_read(Some(settings.patience))
            .timeout_per_write(Some(settings.patience));
        if !settings.proxy {
            config = config.proxy(None);
        }
        if let Some(path) = &settings.certificates {
            let pem = std::fs::read(path).map_err(Error::file("read", path))?;
            let certificates = parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let roots = RootCerts::Specific(Arc::new(certificates.collect()));
            config = config.tls_config(TlsConfig::builder().root_certs(roots).build());
        }
        Ok(Client { agent: config.build().into(), settings })
    }

    /// Lists the repository's files, with sizes and hashes where the Hub reports them.
    pub(crate) fn list(&self, name: &HubName) -> Result<Listing, Error> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Sibling {
            rfilename: String,
            size: Option<u64>,
            blob_id: Option<String>,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            sha256: Option<String>,
            size: Option<u64>,
        }
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.settings.endpoint,
            name.repo(),
            escaped(name.revision()).replace('/', "%2F"),
        );
        let answer = self.ask("GET", &url, 0)?;
        if !answer.last.status().is_success() {
            return Err(self.refusal(name, None, &url, answer));
        }
        let odd = |what: String| Error::Answer {
            what: format!("{url} did not answer with a list of files ({what}): is HF_ENDPOINT a Hub?"),
        };
        let text = answer.last.into_body().into_with_config().limit(MAX_LISTING_BYTES).read_to_string();
        let text = text.map_err(|error| self.unreachable(&error))?;
        let info: Info = serde_json::from_str(&text).map_err(|error| odd(error.to_string()))?;
        if !is_commit(&info.sha) {
            return Err(odd(format!("its commit is {:?}", info.sha)));
        }
        let facts = |sibling: &Sibling| {
            let large = sibling.lfs.as_ref();
            let hash = large.and_then(|lfs| lfs.sha256.as_deref()).or(sibling.blob_id.as_deref());
            Facts { size: large.and_then(|lfs| lfs.size).or(sibling.size), hash: hash.and_then(Hash::parse) }
        };
        // Skip names that would lead out of the folder; no model has such files.
        let files = info.siblings.iter().filter(|sibling| is_safe_path(&sibling.rfilename));
        let files = files.map(|sibling| (sibling.rfilename.clone(), facts(sibling))).collect();
        Ok(Listing { commit: info.sha, files })
    }

    /// Size and hash of a file before it is downloaded. If the listing lacks them, as on some mirrors, it asks
    /// with a HEAD request.
    pub(crate) fn complete(&self, name: &HubName, listing: &Listing, path: &str) -> Result<Remote, Error> {
        let endpoint = &self.settings.endpoint;
        let url = format!("{endpoint}/{}/resolve/{}/{}", name.repo(), listing.commit, escaped(path));
        let mut facts = listing.files.get(path).cloned().unwrap_or_default();
        if facts.size.is_none() || facts.hash.is_none() {
            let answer = self.ask("HEAD", &url, 0)?;
            if answer.last.status().is_client_error() || answer.last.status().is_server_error() {
                return Err(self.refusal(name, Some(path), &url, answer));
            }
            let header = |names: [&str; 2]| names.iter().find_map(|name| text_of(&answer.last, name));
            facts.hash = facts.hash.or_else(|| Hash::parse(&header(["x-linked-etag", "etag"])?));
            facts.size =
                facts.size.or_else(|| header(["x-linked-size", "content-length"])?.trim().parse().ok());
        }
        match (facts.size, facts.hash) {
            (Some(size), Some(hash)) => Ok(Remote { path: path.into(), size, hash, url }),
            _ => Err(Error::Answer {
                what: format!(
                    "{url}: the Hub does not give both its size and its hash, so a download could not be \
                     verified"
                ),
            }),
        }
    }

    /// Opens the file for reading from byte `from`.
    pub(crate) fn open(&self, name: &HubName, file: &Remote, from: u64) -> Result<Opened, Error> {
        let answer = self.ask("GET", &file.url, from)?;
        let response = &answer.last;
        let starts = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT => text_of(response, header::CONTENT_RANGE.as_str())
                .and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok())
                .unwrap_or(from),
            StatusCode::RANGE_NOT_SATISFIABLE => return Ok(Opened::NothingThere),
            _ => return Err(self.refusal(name, Some(&file.path), &file.url, answer)),
        };
        if starts != from && starts != 0 {
            return Ok(Opened::NothingThere);
        }
        Ok(Opened::From(starts, Box::new(answer.last.into_body().into_reader())))
    }

    /// Sends a request and follows redirects.
    fn ask(&self, method: &str, url: &str, from: u64) -> Result<Answer, Error> {
        let mut left = false;
        let mut url = url.to_string();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = ureq::http::Request::builder().method(method).uri(&url);
            request = request.header(header::ACCEPT_ENCODING, "identity");
            if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_ours(&url)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if from > 0 {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let request =
                request.body(()).map_err(|error| Error::Answer { what: format!("{url}: {error}") })?;
            let response = self.agent.run(request).map_err(|error| self.unreachable(&error))?;
            let next = match response.status().is_redirection() {
                true => text_of(&response, header::LOCATION.as_str()),
                false => None,
            };
            let next = next.map(|next| self.join(&url, &next)).transpose()?;
            let elsewhere = next.as_ref().is_some_and(|next| !self.is_ours(next));
            match next {
                // A HEAD request stops at a redirect to another host: the size and hash are in the Hub's own
                // response.
                Some(next) if method == "GET" || !elsewhere => {
                    url = next;
                    left |= elsewhere;
                }
                _ => return Ok(Answer { elsewhere: left, last: response }),
            }
        }
        Err(Error::Answer { what: format!("{url}: too many redirects") })
    }

    /// The target of a redirect. A redirect from https to http is an error.
    fn join(&self, from: &str, to: &str) -> Result<String, Error> {
        let end_of_host = |url: &str| {
            let host = url.find("://").map_or(0, |at| at + 3);
            url[host..].find('/').map_or(url.len(), |at| host + at)
        };
        let odd = |what: &str| Err(Error::Answer { what: format!("{from} redirects to {to}, {what}") });
        if to.starts_with('/') && !to.starts_with("//") {
            Ok(format!("{}{to}", &from[..end_of_host(from)]))
        } else if to.starts_with("https://") || (to.starts_with("http://") && from.starts_with("http://")) {
            Ok(to.into())
        } else if to.starts_with("http://") {
            odd("which is not encrypted")
        } else {
            odd("which is not an address")
        }
    }

    /// Returns whether `url` belongs to the Hub, to which the token may be sent.
    fn is_ours(&self, url: &str) -> bool {
        let rest = url.strip_prefix(self.settings.endpoint.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    pub(crate) fn unreachable(&self, error: &ureq::Error) -> Error {
        let cause = match error {
            ureq::Error::HostNotFound => "no such host".into(),
            ureq::Error::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        Error::Unreachable { endpoint: self.settings.endpoint.clone(), cause }
    }

    /// Turns an unsuccessful response into an error.
    fn refusal(&self, name: &HubName, file: Option<&str>, url: &str, answer: Answer) -> Error {
        let Answer { elsewhere, last: response } = answer;
        let status = response.status().as_u16();
        let code = text_of(&response, "x-error-code").unwrap_or_default();
        let message = text_of(&response, "x-error-message").unwrap_or_else(|| {
            let mut text = String::new();
            let _ = response.into_body().into_reader().take(4096).read_to_string(&mut text);
            let json: Option<serde_json::Value> = serde_json::from_str(&text).ok();
            json.and_then(|json| json["error"].as_str().map(Into::into)).unwrap_or_default()
        });
        let message = one_line(&message);
        let endpoint = self.settings.endpoint.clone();
        let repo = name.repo();
        let has_token = self.settings.token.is_some();
        let tokens = format!("{endpoint}/settings/tokens");
        let status_of = |message: String| Error::Status {
            url: url.into(),
            status,
            answer: if message.is_empty() { message } else { format!(": {message}") },
        };
        match (status, code.as_str()) {
            // The storage host does not know about repositories.
            _ if elsewhere => status_of(message),
            (401 | 403, "GatedRepo") | (403, "") => Error::Gated {
                page: format!("{endpoint}/{repo}"),
                repo,
                tokens,
                why: match has_token {
                    true if message.is_empty() => "the account of this token has no access".into(),
                    true => message,
                    false => {
                        "it is given to accounts that have accepted its terms, and no token is set".into()
                    }
                },
            },
            (404, "RevisionNotFound") => Error::NoRevision { repo, revision: name.revision().into() },
            (404, "EntryNotFound") if file.is_some() => Error::NoSuchFile {
                repo,
                asked: format!("file {}", file.unwrap_or_default()),
                there: "although its list of files names it; try again".into(),
            },
            // Without access, the Hub does not reveal whether a private repository exists.
            (404, _) | (401, "RepoNotFound") => Error::NoRepository {
                endpoint,
                repo,
                advice: match has_token {
                    true => ", and that the token may read it",
                    false => "; for a private one, set HF_TOKEN",
                },
            },
            (401, _) if has_token => Error::Token {
                endpoint,
                tokens,
                answer: if message.is_empty() { "it answered 401".into() } else { message },
            },
            (401, _) => Error::NoRepository { endpoint, repo, advice: "; for a private one, set HF_TOKEN" },
            _ => status_of(message),
        }
    }
}

struct Answer {
    /// True if a redirect led to another host, so the response is not the Hub's.
    elsewhere: bool,
    last: Response<Body>,
}

pub(crate) enum Opened {
    /// The body, and the offset at which it starts: the requested one, or 0.
    From(u64, Box<dyn Read>),
    /// The server cannot serve that range.
    NothingThere,
}

fn text_of(response: &Response<Body>, name: &str) -> Option<String> {
    response.headers().get(name)?.to_str().ok().map(Into::into)
}

/// A server's message, shortened and without control characters.
fn one_line(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    text.trim().into()
}

/// Percent-encodes a path for a URL.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                out.push(byte.into())
            }
            byte => out += &format!("%{byte:02X}"),
        }
    }
    out
}
