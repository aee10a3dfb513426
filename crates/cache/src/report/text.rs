//! Reports as readable text.
use super::{BlockReport, Report};
use crate::arena::{ArenaReport, Layout};
use std::fmt::{self, Display, Formatter};

/// Blocks, or groups of blocks, per row of a map.
const MAP_COLUMNS: usize = 64;
/// Larger maps show groups of blocks, so that a map fits the screen.
const MAP_ROWS: usize = 32;

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (capacity, used) = (self.capacity_cells, self.used_cells);
        let free = capacity - used;
        writeln!(
            f,
            "cells: {used} of {capacity} used, {free} free, all used ones below {}",
            self.high_water
        )?;
        if let Some(blocks) = self.blocks {
            let BlockReport { block_tokens, total, free, evictable, unused_cells, counters: n } = blocks;
            let in_use = total - free - evictable;
            writeln!(
                f,
                "blocks of {block_tokens} tokens: {in_use} of {total} in use, {evictable} evictable, {free} free"
            )?;
            let (external, internal) = (blocks.external_fragmentation(), blocks.internal_fragmentation());
            writeln!(
                f,
                "fragmentation: external {external:.2} (any free block serves any request), internal {internal:.2} ({unused_cells} cells of blocks in use unused)"
            )?;
            write!(f, "so far: {} allocated, {} freed, {} evicted", n.allocated, n.freed, n.evicted)?;
            write!(f, ", {} hit, {} stored, {} shared", n.hit, n.stored, n.shared)?;
            writeln!(f, ", {} copied on write, {} became evictable", n.copied_on_write, n.became_evictable)?;
        }
        writeln!(f, "sequences: {}", self.sequences.len())?;
        for s in &self.sequences {
            write!(f, "  {}: {} tokens, next position {}", s.seq, s.len, s.next_position)?;
            writeln!(f, ", {} nodes, {} runs of cells", s.n_nodes, s.n_extents)?;
        }
        Ok(())
    }
}

/// An [`ArenaReport`] as lines of text. Made by [`ArenaReport::text`].
pub struct ArenaText<'r> {
    report: &'r ArenaReport,
    bytes: Option<u64>,
}

impl ArenaReport {
    /// The report as text. Given the buffers' layout and their bytes per element, also in bytes, K and V together.
    pub fn text(&self, buffers: Option<(&Layout, u32)>) -> ArenaText<'_> {
        let bytes = buffers.and_then(|(layout, bytes_per_element)| layout.bytes(bytes_per_element));
        ArenaText { report: self, bytes }
    }
}

impl Display for ArenaText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let it = self.report;
        let (total, used, free) = (it.total_blocks, it.used_blocks, it.free_blocks);
        writeln!(
            f,
            "blocks: {used} of {total} used, {free} free, {} tokens each ({})",
            it.block_tokens, it.allocator
        )?;
        if let Some(bytes) = self.bytes {
            // All blocks have the same size, so this division has no remainder.
            let of = |blocks: u32| Bytes(bytes / u64::from(total.max(1)) * u64::from(blocks));
            writeln!(f, "bytes: {} of {} used, {} free", of(used), Bytes(bytes), of(free))?;
        }
        let (external, internal) = (it.external_fragmentation(), it.internal_fragmentation());
        write!(
            f,
            "fragmentation: external {external:.2} (largest free run {} of {free})",
            it.largest_free_run
        )?;
        writeln!(f, ", internal {internal:.2}")?;
        let n = it.counters;
        write!(
            f,
            "so far: {} allocated, {} freed, {} evicted, {} refused",
            n.allocated, n.freed, n.evicted, n.refused
        )?;
        writeln!(f, ", {} halted, {} grown, {} blocks copied", n.halted, n.grown, n.blocks_copied)?;
        writeln!(f, "sequences: {}", it.sequences.len())?;
        for (row, s) in it.sequences.iter().enumerate() {
            let (end, reserved) = (s.start + s.len, s.start + s.reserved);
            write!(f, "  {} {}: {} of {} tokens, ", glyph(row), s.seq, s.used_tokens, s.capacity_tokens)?;
            write!(f, "blocks {}..{end}", s.start)?;
            if reserved > end {
                write!(f, ", reserved up to {reserved}")?;
            }
            writeln!(f)?;
        }
        self.map(f)
    }
}

impl ArenaText<'_> {
    fn map(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rows = self.report.sequences.iter().enumerate().map(|(row, s)| (s.seq, row));
        let rows: std::collections::BTreeMap<_, _> = rows.collect();
        let map = self.report.block_map();
        let group = map.len().div_ceil(MAP_COLUMNS * MAP_ROWS).max(1);
        let per_character = if group == 1 { "a block".to_owned() } else { format!("{group} blocks") };
        writeln!(
            f,
            "block map ({per_character} per character, `.` is free{})",
            if group == 1 { "" } else { ", `+` is mixed" }
        )?;
        for (n, line) in map.chunks(group * MAP_COLUMNS).enumerate() {
            let cells = line.chunks(group).map(|blocks| match blocks[0] {
                first if blocks.iter().any(|&owner| owner != first) => '+',
                Some(seq) => glyph(rows[&seq]),
                None => '.',
            });
            writeln!(f, "{:>8} {}", n * group * MAP_COLUMNS, cells.collect::<String>())?;
        }
        Ok(())
    }
}

/// Letters and digits alternately; adjacent sequences get different ones.
fn glyph(row: usize) -> char {
    const GLYPHS: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    char::from(GLYPHS[row % GLYPHS.len()])
}

/// Bytes in the largest binary unit that does not exceed the number.
struct Bytes(u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        let Some(unit) = UNITS.iter().enumerate().rev().find(|(i, _)| self.0 >> (10 * (i + 1)) > 0) else {
            return write!(f, "{} B", self.0);
        };
        let size = self.0 as f64 / (1u64 << (10 * (unit.0 + 1))) as f64;
        write!(f, "{size:.2} {}", unit.1)
    }
}
