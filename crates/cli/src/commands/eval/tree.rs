//! The picture of a verified draft tree.
use kvist_engine::speculate::{DraftTree, DraftedPass, Verified};
use kvist_model::Error;
use kvist_model::tokenizer::Tokenizer;
use std::fmt::Write;

/// A tree that was verified, and what followed.
pub struct Verification {
    known: Vec<u32>,
    tree: DraftTree,
    verified: Verified,
}

/// What a node is in the picture.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Known,
    Accepted,
    Rejected,
    Bonus,
}

impl Role {
    const ALL: [Role; 4] = [Role::Known, Role::Accepted, Role::Rejected, Role::Bonus];

    /// Name, fill, line and text.
    fn look(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Role::Known => ("known text", "#dce6f5", "#4c72b0", "#1d3557"),
            Role::Accepted => ("accepted", "#d9efdc", "#2e8b57", "#14532d"),
            Role::Rejected => ("rejected", "#f4f4f4", "#b5b5b5", "#6b6b6b"),
            Role::Bonus => ("one more, from the same pass", "#fdebd8", "#c7702a", "#7a3f10"),
        }
    }
}

/// A box of the picture.
struct Node {
    /// Index of the box that it continues.
    parent: usize,
    column: usize,
    /// In rows.
    y: f64,
    role: Role,
    text: String,
    probability: Option<f32>,
}

const COLUMN: f64 = 128.0;
const ROW: f64 = 36.0;
const HEIGHT: f64 = 26.0;
/// Of a letter.
const LETTER: f64 = 7.3;
/// Letters of the known text, and most letters of a node.
const LETTERS: (usize, usize) = (26, 11);

impl Verification {
    /// Keeps the pass that shows more: the longest accepted path, beside at least one rejected node; the first of equals.
    pub fn keep_better(kept: &mut Option<Verification>, known: &[u32], pass: &DraftedPass) {
        let (tree, verified) = (&pass.draft.tree, &pass.verified);
        let worth = |tree: &DraftTree, verified: &Verified| {
            (!verified.finished && tree.len() > verified.path.len(), verified.path.len(), tree.len().min(1))
        };
        let least = kept.as_ref().map_or((false, 0, 0), |kept| worth(&kept.tree, &kept.verified));
        if worth(tree, verified) > least {
            let (tree, verified) = (tree.clone(), verified.clone());
            *kept = Some(Verification { known: known.to_vec(), tree, verified });
        }
    }

    /// The text that `token` adds to the known text and the tokens `path`.
    fn piece(&self, tokenizer: &Tokenizer, path: &[u32], token: u32) -> Result<String, Error> {
        let before = [&self.known[..], path].concat();
        let mut stream = tokenizer.stream_after(tokenizer.context_of(&before), &[]);
        let piece = stream.push(token)? + &stream.finish()?;
        Ok(shortened(&shown(&piece), LETTERS.1))
    }

    /// The boxes: the known text, the nodes, and the token that the pass gave after the accepted path.
    fn nodes(&self, tokenizer: &Tokenizer) -> Result<Vec<Node>, Error> {
        let tail = tokenizer.decode(&self.known[self.known.len().saturating_sub(24)..])?;
        let tail: Vec<char> = shown(&tail).chars().collect();
        let text = "…".to_string() + &String::from_iter(&tail[tail.len().saturating_sub(LETTERS.0)..]);
        let mut nodes =
            vec![Node { parent: 0, column: 0, y: 0.0, role: Role::Known, text, probability: None }];
        let mut paths: Vec<Vec<u32>> = vec![Vec::new()];
        let path = &self.verified.path;
        for node in 0..self.tree.len() {
            let (token, at) = (self.tree.tokens()[node], node as u32);
            let parent = self.tree.parents()[node].map_or(0, |parent| parent as usize + 1);
            let role = if path.contains(&at) { Role::Accepted } else { Role::Rejected };
            let text = self.piece(tokenizer, &paths[parent], token)?;
            let probability = Some(self.tree.probabilities()[node]);
            nodes.push(Node { parent, column: nodes[parent].column + 1, y: 0.0, role, text, probability });
            paths.push([&paths[parent][..], &[token]].concat());
        }
        if let Some(token) = self.verified.tokens.get(path.len()) {
            let parent = path.last().map_or(0, |node| *node as usize + 1);
            let text = self.piece(tokenizer, &paths[parent], *token)?;
            let column = nodes[parent].column + 1;
            nodes.push(Node { parent, column, y: 0.0, role: Role::Bonus, text, probability: None });
        }
        Ok(nodes)
    }

    /// The picture, as a file of its own.
    pub fn svg(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let mut nodes = self.nodes(tokenizer)?;
        let rows = place(&mut nodes, 0, 0.0);
        let columns = nodes.iter().map(|node| node.column).max().unwrap_or(0);
        let first = (LETTERS.0 + 3) as f64 * LETTER;
        let (top, left) = (44.0, 12.0);
        let x = |column: usize| match column {
            0 => left,
            n => left + first + 34.0 + (n - 1) as f64 * COLUMN,
        };
        let (width, height) = (x(columns) + COLUMN, top + rows * ROW + 44.0);
        let (drafted, accepted) = (self.tree.len(), self.verified.path.len());
        let title = format!(
            "One pass: {drafted} draft tokens verified, {accepted} accepted, {} new tokens",
            self.verified.tokens.len()
        );
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"monospace\" font-size=\"12\" role=\"img\">\n\
             <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
             <text x=\"{left}\" y=\"24\" font-family=\"sans-serif\" font-size=\"14\" fill=\"#222222\">{title}</text>\n"
        );
        let boxed = |node: &Node| match node.column {
            0 => first,
            _ => (node.text.chars().count() + 2) as f64 * LETTER,
        };
        let middle = |node: &Node| top + (node.y + 0.5) * ROW;
        for node in &nodes[1..] {
            let parent = &nodes[node.parent];
            let (x0, y0) = (x(parent.column) + boxed(parent), middle(parent));
            let (x1, y1) = (x(node.column), middle(node));
            let bend = (x0 + x1) / 2.0;
            let (_, _, line, _) = node.role.look();
            let thick = if node.role == Role::Rejected { 1.0 } else { 2.0 };
            let _ = writeln!(
                svg,
                "<path d=\"M{x0:.1} {y0:.1} C{bend:.1} {y0:.1} {bend:.1} {y1:.1} {x1:.1} {y1:.1}\" fill=\"none\" \
                 stroke=\"{line}\" stroke-width=\"{thick}\"/>"
            );
        }
        for node in &nodes {
            draw(&mut svg, node.role, &node.text, (x(node.column), middle(node)), boxed(node));
            if let Some(probability) = node.probability {
                let (at, y) = (x(node.column) + boxed(node) - 2.0, middle(node) - HEIGHT / 2.0 - 2.0);
                let _ = writeln!(
                    svg,
                    "<text x=\"{at:.1}\" y=\"{y:.1}\" font-size=\"9\" text-anchor=\"end\" \
                     fill=\"#6b6b6b\">{:.0} %</text>",
                    100.0 * probability
                );
            }
        }
        let mut at = left;
        for role in Role::ALL {
            let (name, ..) = role.look();
            let width = (name.chars().count() + 2) as f64 * LETTER;
            draw(&mut svg, role, name, (at, height - 22.0), width);
            at += width + 12.0;
        }
        svg += "</svg>\n";
        Ok(svg)
    }
}

/// A box with text, from `x` on, around the height `y`.
fn draw(svg: &mut String, role: Role, text: &str, (x, y): (f64, f64), width: f64) {
    let (_, fill, line, letters) = role.look();
    let dashes = if role == Role::Bonus { " stroke-dasharray=\"4 3\"" } else { "" };
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{HEIGHT}\" rx=\"6\" fill=\"{fill}\" \
         stroke=\"{line}\"{dashes}/>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"{letters}\" \
         xml:space=\"preserve\">{}</text>",
        y - HEIGHT / 2.0,
        x + width / 2.0,
        y + 4.0,
        escaped(text)
    );
}

/// Places a node and its descendants from row `top` on, and returns the rows that they take. A node stands beside the first
/// of those that follow it, so the likeliest path is a straight line.
fn place(nodes: &mut [Node], node: usize, top: f64) -> f64 {
    let children: Vec<usize> = (node + 1..nodes.len()).filter(|child| nodes[*child].parent == node).collect();
    nodes[node].y = top;
    let mut rows = 0.0;
    for child in children {
        rows += place(nodes, child, top + rows);
    }
    f64::max(rows, 1.0)
}

/// Blanks and line breaks as letters that can be seen; other control characters as a dot.
fn shown(text: &str) -> String {
    let letter = |c| match c {
        ' ' => '␣',
        '\n' => '⏎',
        c if c.is_control() => '·',
        c => c,
    };
    text.chars().map(letter).collect()
}

fn shortened(text: &str, most: usize) -> String {
    match text.chars().count() <= most {
        true => text.into(),
        false => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
