//! A recommendation as text: a table of caches, and command lines to paste.
use super::candidates::{Command, longest, smallest};
use super::recommendation::{Kl, Recommendation, Row};
use kvist_device::Bytes;

impl Recommendation {
    pub fn text(&self) -> String {
        let models = self.kl.models.join(" and ");
        let whose = match self.kl.of_this_model {
            true => format!("measured here, on {models}:"),
            false => format!("not of this model (that is --measure): measured on {models},"),
        };
        let mut lines = vec![
            "KL               from a cache in f32: mean, nats per token".to_string(),
            format!("                 {whose} {}", self.kl.measured_on),
            String::new(),
        ];
        for (title, rows) in self.groups() {
            lines.push(title);
            lines.extend(table(&self.kl, &rows));
            lines.push(String::new());
        }
        lines.extend(self.run.as_ref().map(|pick| format!("run it           {}", pick.command_line)));
        lines.extend(self.serve_line());
        lines.join("\n") + "\n"
    }

    fn serve_line(&self) -> Option<String> {
        if let Some(pick) = &self.serve {
            return Some(format!("serve it         {}", pick.command_line));
        }
        let candidates = || self.candidates.iter().map(|row| &row.candidate);
        let min = smallest(candidates(), Command::Serve)?;
        let shorter = longest(candidates(), Command::Serve)
            .map(|shorter| format!("; {} --context {} fits", shorter.flags(), shorter.useful_context()));
        Some(format!(
            "serve it         does not fit: at least {} are needed, since {} take memory too{}",
            Bytes(min.total_bytes),
            self.beside_the_cache(),
            shorter.unwrap_or_default()
        ))
    }

    /// What a server has besides its cache.
    fn beside_the_cache(&self) -> &'static str {
        if self.has_tiers { "requests and tiers" } else { "requests" }
    }

    /// Groups kinds with the same figures.
    fn groups(&self) -> Vec<(String, Vec<&Row>)> {
        let mut groups: Vec<(Command, Vec<&str>, Vec<&Row>)> = Vec::new();
        let figures = |rows: &[&Row]| {
            let figures = |row: &&Row| (row.total_bytes, row.context_fits_tokens);
            rows.iter().map(figures).collect::<Vec<_>>()
        };
        for rows in self.candidates.chunk_by(|a, b| (a.command, a.kind) == (b.command, b.kind)) {
            let rows: Vec<&Row> = rows.iter().collect();
            let (command, kind) = (rows[0].command, rows[0].kind);
            let same =
                groups.iter_mut().find(|(c, _, known)| *c == command && figures(known) == figures(&rows));
            match same {
                Some((_, kinds, _)) => kinds.push(kind),
                None => groups.push((command, vec![kind], rows)),
            }
        }
        let title = |command: Command, kinds: &[&str], row: &Row| match command {
            Command::Serve => format!("kvist serve, its {} included", self.beside_the_cache()),
            Command::Run => {
                let window = row.candidate.cache.window.map(|window| format!(" --window {window}"));
                format!("kvist run --kind {}{}", kinds.join(" or "), window.unwrap_or_default())
            }
        };
        groups.into_iter().map(|(command, kinds, rows)| (title(command, &kinds, rows[0]), rows)).collect()
    }
}

fn table(source: &Kl, rows: &[&Row]) -> Vec<String> {
    let mut head: Vec<String> =
        ["K", "V", "per token", "total", "fits", "longest context"].map(String::from).to_vec();
    match source.models.as_slice() {
        [_] => head.push("KL".into()),
        models => head.extend(models.iter().map(|model| format!("KL {model}"))),
    }
    let mut cells = vec![head];
    cells.extend(rows.iter().map(|row| {
        let mut line = vec![
            row.k.clone(),
            row.v.clone(),
            Bytes(row.kv_bytes_per_token).to_string(),
            Bytes(row.total_bytes).to_string(),
            if row.fits { "yes" } else { "no" }.into(),
            row.context_fits_tokens.to_string(),
        ];
        let kl = |kl: &Option<f64>| kl.map_or_else(|| "-".into(), |kl| format!("{kl:.1e}"));
        line.extend(row.kl_means.iter().map(kl));
        line
    }));
    aligned(&cells)
}

/// Aligns names left and figures right.
fn aligned(cells: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| cells.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let line = |line: &Vec<String>| {
        let cell = |(column, text): (usize, &String)| match column {
            0 | 1 => format!("  {text:<0$}", width(column)),
            _ => format!("  {text:>0$}", width(column)),
        };
        line.iter().enumerate().map(cell).collect::<String>()
    };
    cells.iter().map(line).collect()
}
