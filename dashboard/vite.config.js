import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

// Names without hashes, so that the committed bundle changes where its sources do; relative paths, so that it may be
// served below any folder. Nothing is inlined: the server forbids inline scripts.
export default defineConfig({
  base: './',
  plugins: [svelte({ compilerOptions: { css: 'external' } })],
  build: {
    outDir: process.env.KVIST_BUNDLE ?? '../crates/server/dashboard',
    emptyOutDir: true,
    target: 'es2022',
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    rollupOptions: {
      output: {
        entryFileNames: 'assets/app.js',
        chunkFileNames: 'assets/[name].js',
        assetFileNames: 'assets/[name][extname]',
      },
    },
  },
  server: { proxy: { '/v1': 'http://127.0.0.1:8080', '/kvist': 'http://127.0.0.1:8080' } },
});
